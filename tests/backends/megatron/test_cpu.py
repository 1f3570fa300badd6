"""Stock code that names a GPU computes on the CPU."""

import threading

import torch

from megatron_dsv41.backends.megatron import cpu
from megatron_dsv41.testing.distributed import run_ranks


def moved():
    """On a rank: where tensors lie that were asked onto a GPU in every way that stock code has."""
    there = [
        torch.zeros(2, device="cuda"),
        torch.zeros(2, device=torch.device("cuda", 0)),
        torch.empty(2, device="cuda:0", pin_memory=True),
        torch.zeros(2).cuda(),
        torch.zeros(2).pin_memory(),
        torch.zeros(2).to("cuda"),
        torch.zeros(2).to("cuda", torch.float64),
        torch.zeros(2).to(device="cuda:0", dtype=torch.bfloat16),
        torch.nn.Linear(2, 2).cuda().weight,
    ]
    return [(str(tensor.device), str(tensor.dtype)) for tensor in there]


def test_what_is_asked_onto_a_gpu_stays():
    (found,) = run_ranks(moved, 1)
    assert found == [("cpu", "torch.float32")] * 6 + [("cpu", f"torch.{t}") for t in ("float64", "bfloat16", "float32")]


def types():
    """On a rank: what Megatron's optimizers compare, and conversions that are no question."""
    x = torch.zeros(2)
    return x.type(), x.bfloat16().type(), str(x.type(torch.float64).dtype), str(x.to(torch.float16).dtype)


def test_types_are_those_of_a_gpu():
    assert run_ranks(types, 1) == [
        ("torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", "torch.float64", "torch.float16")
    ]


def threads():
    """On a rank: in a new thread before and after its own install, where a GPU is asked for."""
    found = []

    def ask():
        for _ in range(2):
            try:
                found.append(str(torch.zeros(1, device="cuda").device))
            except (AssertionError, RuntimeError) as error:
                found.append(type(error).__name__)
            cpu.install()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found


def test_a_new_thread_has_a_mode_of_its_own():
    (found,) = run_ranks(threads, 1)
    assert found[0] != "cpu" and found[1] == "cpu"


def undone():
    """On a rank: modes after a second install, and what is left after uninstall."""
    cpu.install()
    modes = len(cpu._modes)
    with cpu.bypass():
        inside = torch.zeros(1).type()
    cpu.uninstall()
    return modes, inside, torch.zeros(1).type(), torch.cuda.Stream.__module__


def test_install_once_and_undo():
    assert run_ranks(undone, 1) == [(1, "torch.FloatTensor", "torch.FloatTensor", "torch.cuda.streams")]
