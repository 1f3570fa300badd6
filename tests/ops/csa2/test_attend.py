"""What the GPU providers of csa2.sparse_attend share, as far as it runs on the CPU."""

import pytest
import torch

from megatron_dsv41.ops.csa2.attend import Problem, slot_table


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
