"""Transforms are invertible and keep the parts' bytes in order."""

from __future__ import annotations

import pytest
import torch

from megatron_dsv41.checkpoint.transforms import same, stack, stack_gate_up


@pytest.mark.parametrize(("via", "lead"), [(same(), ()), (stack(3), (3,)), (stack_gate_up(3), (3, 2))])
def test_round_trip_moves_whole_parts(via, lead):
    parts = [torch.full((4, 5), float(i)) for i in range(via.num_parts)]
    native = via.to_native(parts)
    assert tuple(native.shape) == via.native_shape((4, 5)) == (*lead, 4, 5)
    assert all(torch.equal(a, b) for a, b in zip(via.to_released(native), parts, strict=True))
    assert torch.equal(native.flatten(), torch.cat([part.flatten() for part in parts]))


def test_a_slice_of_experts_is_a_slice_of_parts():
    via = stack_gate_up(4)
    assert via.parts_of((range(1, 3), range(2))) == [2, 3, 4, 5]
    assert via.parts_of((range(1, 3), range(1, 2))) == [3, 5]
    parts = [torch.full((2,), float(i)) for i in range(8)]
    native = via.to_native(parts)
    assert torch.equal(via.to_native(parts[2:6]), native[1:3])
