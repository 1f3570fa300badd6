"""The layouts that tests prove: what test files run, and what the support matrix of the README lists."""

from __future__ import annotations

import itertools

from megatron_dsv41.parallel.stages import layout_string

LAYERS = 8  # of the parity models


def cut(*starts: int) -> str:
    """A pipeline whose stages begin at these layers."""
    stages = [range(a, b) for a, b in itertools.pairwise([0, *starts, LAYERS])]
    return f"pp={len(stages)},layout={layout_string(stages)}"


TWO_RANKS = [
    "tp=2",
    "tp=2,sp",
    "cp=2",
    "ep=2",
    "ep=2,dispatcher=alltoall",
    "tp=2,sp,gradient_accumulation_fusion",
    "pp=2,recompute,gradient_accumulation_fusion",
    "dp=2",
    "pp=2,vpp=2",
    "pp=2,recompute",
]
TWO_RANKS += [
    "tp=2,sp,ep=2",
    "tp=2,sp,etp=1",
    "pp=2,recompute=selective",
    "pp=2,recompute=full",
    "pp=2,vpp=2,shadows=always",
]
TWO_CUTS = [cut(start) for start in range(1, LAYERS)]
FOUR_RANKS = ["cp=4", "ep=4", "pp=4", "pp=4,vpp=2", "tp=2,pp=2", "tp=2,sp,pp=2,vpp=2", "pp=2,ep=2", "cp=2,pp=2"]
FOUR_RANKS += ["tp=2,cp=2", "tp=2,sp,cp=2", "tp=2,sp,ep=2,etp=2", "tp=2,sp,ep=2,dp=2", "cp=2,dp=2", "cp=2,ep=2,dp=2"]
FOUR_RANKS += ["pp=2,dp=2", "tp=2,sp,pp=2,layout=Ettttt|tttL,shadows=always"]
FOUR_CUTS = [cut(*starts) for starts in itertools.combinations(range(1, LAYERS), 3)]
SAMPLE_CUTS = [cut(1, 3, 5), cut(2, 6, 7)]
SAMPLE = ["tp=2,sp", "cp=2", "ep=2", "pp=2", "pp=2,vpp=2"]  # on the cases of packed documents and odd lengths

# Training against one process: ranks, and what the run file says.
CURVES: dict[str, tuple[int, tuple[str, ...]]] = {
    "pp=2": (2, ("parallel.pp=2",)),
    "pp=2,vpp=2,recompute": (2, ("parallel.pp=2", "parallel.vpp=2", "train.recompute=block")),
    "tp=2,sp": (2, ("parallel.tp=2", "parallel.sp=true")),
    "cp=2": (2, ("parallel.cp=2",)),
    "ep=2": (2, ("parallel.ep=2",)),
    "tp=2,pp=2": (4, ("parallel.tp=2", "parallel.pp=2")),
    "cp=2,pp=2,shadows=always": (
        4,
        ("parallel.cp=2", "parallel.pp=2", "parallel.layout=Ettttt|tttL", "parallel.shadows=always"),
    ),
    "tp=2,sp,ep=2,dp=2": (4, ("parallel.tp=2", "parallel.sp=true", "parallel.ep=2")),
}
SHORT_CURVES = ["pp=2", "pp=2,vpp=2,recompute", "tp=2,sp", "cp=2", "ep=2"]  # in the default suite
