"""The rotation compiles for SM90 without a GPU, without spills: of whole heads, and of the turned channels alone."""

import importlib.util
import re
from collections import Counter

import pytest

from megatron_dsv41.testing.sm90 import compile_kernel

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
POINTERS = {"x": "bf16", "out": "bf16", "cos": "fp32", "sin": "fp32"}
HEAD = dict(HEADS=64, D=512, PAIRS=32, SIGN=1.0)
WHOLE, OWNED = dict(FIRST=0, BLOCK_P=256, ROWS=8), dict(FIRST=448, BLOCK_P=32, ROWS=64)
SHAPES = {"whole heads": HEAD | WHOLE, "owned": HEAD | OWNED}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    from megatron_dsv41.ops.rope.triton_rotate import _rotate

    folder = tmp_path_factory.mktemp("sm90")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        return {name: compile_kernel(_rotate, shape, POINTERS, folder, num_warps=4) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_spills_and_rows_move_16_bytes_at_a_time(compiled, name):
    kernel = compiled[name]
    assert not kernel.stack
    assert "ld.global.v4.b32" in kernel.ptx and "st.global.v4.b32" in kernel.ptx


def test_both_round_alike(compiled):
    """A thread of either turns 16 pairs, with as many products, sums and fused ones."""
    found = [Counter(re.findall(r"\b((?:mul|add|sub|fma|neg)\S*\.f32)\b", kernel.ptx)) for kernel in compiled.values()]
    assert found[0] == found[1] and found[0]["fma.rn.f32"] == 32
