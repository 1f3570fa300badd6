import pytest
import torch

from megatron_dsv41.ops.host_copy import HostCopy


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gives_the_values_of_when_it_was_made(device):
    source = torch.arange(1 << 20, device=device)
    copy = HostCopy(source.sum(0, keepdim=True))
    source.zero_()
    value = copy.wait()
    assert value.device.type == "cpu" and value.tolist() == [(1 << 19) * ((1 << 20) - 1)]


@pytest.mark.gpu
def test_does_not_wait_for_what_is_queued_after_it():
    copy = HostCopy(torch.ones(1, device="cuda"))
    torch.cuda._sleep(2_000_000_000)  # about a second
    end = torch.cuda.Event()
    end.record()
    assert copy.wait().item() == 1 and not end.query()
