"""Which layers run on which pipeline stage. Any cut is legal; stages are numbered in the order data passes them."""

from __future__ import annotations

import re

EXPLAINED = 'a layout looks like "Et*3|(tt|)*2tL": E embedding, t one layer, L head, | between stages, *n repeats'


def even_stages(num_layers: int, num_stages: int, embedding: bool = False, head: bool = False) -> list[range]:
    """Contiguous layers per stage, as equal as can be; the longer stages come last.

    `embedding`, `head`: count the embedding or the head as one layer of the first or last stage.
    """
    units = num_layers + embedding + head
    if units < num_stages:
        raise ValueError(
            f"{num_layers} layers cannot fill {num_stages} pipeline stages: lower parallel.pp or parallel.vpp"
        )
    sizes = [units // num_stages + (stage >= num_stages - units % num_stages) for stage in range(num_stages)]
    sizes[0] -= embedding
    sizes[-1] -= head
    return _ranges(sizes)


def parse_layout(layout: str, num_layers: int, num_stages: int) -> list[range]:
    """Stages of Megatron's layout string. ValueError when it does not describe this model."""
    text = re.sub(r"[\s,]", "", layout)
    while match := re.search(r"\(([^()]*)\)\*(\d+)", text):
        text = text[: match.start()] + match[1] * int(match[2]) + text[match.end() :]
    while match := re.search(r"([EtL])\*(\d+)", text):
        text = text[: match.start()] + match[1] * int(match[2]) + text[match.end() :]
    if not re.fullmatch(r"E[t|]*L", text):
        raise ValueError(f"parallel.layout {layout!r} cannot be read: {EXPLAINED}")
    stages = text.split("|")
    if len(stages) != num_stages:
        raise ValueError(
            f"parallel.layout {layout!r} has {len(stages)} stages, parallel.pp x parallel.vpp is {num_stages}"
        )
    sizes = [stage.count("t") for stage in stages]
    if sum(sizes) != num_layers:
        raise ValueError(f"parallel.layout {layout!r} has {sum(sizes)} layers, the model has {num_layers}")
    return _ranges(sizes)


def layout_string(stages: list[range]) -> str:
    """The layout of stages in Megatron's notation."""
    return "E" + "|".join("t" * len(stage) for stage in stages) + "L"


def _ranges(sizes: list[int]) -> list[range]:
    ranges, begin = [], 0
    for size in sizes:
        ranges.append(range(begin, begin + size))
        begin += size
    return ranges
