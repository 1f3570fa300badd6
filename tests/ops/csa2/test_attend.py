"""What the GPU providers of csa2.sparse_attend share, as far as it runs on the CPU."""

import pytest
import torch

from megatron_dsv41.ops.csa2 import checks
from megatron_dsv41.ops.csa2.attend import Problem, Provider, slot_table


@pytest.mark.parametrize("block, padding", [(1, 0), (3, 0), (4, 1), (64, 61)])
def test_slot_table_names_rows_of_both_latents(block, padding):
    """A halo of one row, a document that begins at row 2, a selected entry, none, and another; entries follow row 3."""
    problem = Problem(
        num_tokens=3, num_heads=2, dim=8, window=2, num_topk=1, window_offset=1, scale=1.0, deterministic=False
    )
    topk, start = torch.tensor([[0], [-1], [3]], dtype=torch.int32), torch.tensor([0, 2, 2])
    table = slot_table(problem, topk, start, 4, block)
    wanted = torch.tensor([[0, 1, 4], [-1, 2, -1], [2, 3, 7]], dtype=torch.int32)
    assert table.dtype == torch.int32 and table.is_contiguous()
    assert torch.equal(table, torch.nn.functional.pad(wanted, (0, padding), value=-1))


def unreachable(*args):
    raise AssertionError("a kernel runs on what its provider refuses")


@pytest.mark.parametrize(
    ("shape", "capability", "deterministic", "message"),
    [
        ((4, 2, 16), (9, 0), False, "takes 8 channels, got 16"),
        ((4, 1, 8), (9, 0), False, "takes 2 to 3 heads, got 1"),
        ((4, 2, 8), (10, 0), False, "needs compute capability 9.0, a GPU has 10.0; choose 'triton'"),
        ((4, 2, 8), (9, 0), True, "has no deterministic gradients"),
        ((4, 2, 8), (9, 0), None, "has no deterministic gradients"),
        ((4, 2, 8), (9, 0), False, None),
    ],
)
def test_a_provider_refuses_what_its_kernels_do_not_do(monkeypatch, shape, capability, deterministic, message):
    monkeypatch.setattr(checks, "INTERPRETED", True)  # tensors on the CPU are welcome
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: True)
    provider = Provider(
        "narrow", unreachable, unreachable, unreachable, dims=(8,), heads=range(2, 4), hopper=True, repeatable=False
    )
    tokens, heads, dim = shape
    q, window_kv = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(tokens, dim, dtype=torch.bfloat16)
    sink, start = torch.zeros(heads), torch.zeros(tokens, dtype=torch.int64)
    error, match = (AssertionError, "a kernel runs") if message is None else (ValueError, f"'narrow' {message}")
    with pytest.raises(error, match=match):
        provider(q, window_kv, None, None, sink, start, 0, 0.5, window=2, deterministic=deterministic)
