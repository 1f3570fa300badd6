"""Time the fused elementwise and mHC kernels beside the reference ops, on one GPU, in one run.

    python tools/bench_fused.py [--tokens 4096] [--ops site expand gate rope norm swiglu quant] [--ref]

Medians (lowest-highest) over CUDA-graph replays. The floor of a line is its bytes, each input read once and each output
written once, at the 4.3 TB/s that an H200 copies with (docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dsv41.ops.registry import load, providers
from megatron_dsv41.ops.rope.ref import cos_sin, plain_frequencies
from megatron_dsv41.testing.bench import backward_call, device_ms, table

TBPS = 4.3
DIM, STREAMS, HEADS, HEAD_DIM, INNER, EXPERTS_PER_TOKEN = 5120, 4, 64, 512, 2304, 6
CONSTANTS = (20, 1e-6, 1e-20)


class Case(NamedTuple):
    """One op at one size. `forward` takes the provider's function; GB moved forward and backward at least."""

    name: str
    op: str
    forward: Callable[[Callable], Sequence[Tensor]]
    inputs: list[Tensor]
    forward_gb: float
    backward_gb: float | None


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A leaf of standard normal values."""
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def positive(*shape: int) -> Tensor:
    """A leaf of fp32 values in [0, 1)."""
    return torch.rand(*shape, device="cuda").requires_grad_()


def site(tokens: int) -> Iterator[Case]:
    """mHC: update, coefficients and the next input of one sublayer; then of a layer's first, without update."""
    one = tokens * DIM * 2e-9
    operands = [random(tokens, DIM), random(tokens, STREAMS, DIM), positive(tokens, 4), positive(tokens, 4, 4)]
    operands += [positive(tokens, 4), random(24, 4 * DIM, dtype=torch.float32), positive(24), positive(3)]
    yield Case("mHC site", "mhc.site", lambda f: f(*operands, *CONSTANTS), operands, 10 * one, 15 * one)
    _, streams, _, _, *rest = operands
    first = lambda f: f(None, streams, None, None, *rest, *CONSTANTS)  # noqa: E731
    yield Case("mHC first site", "mhc.site", first, [streams, *rest], 5 * one, 13 * one)


def expand(tokens: int) -> Iterator[Case]:
    """mHC: the update alone, of a model's last sublayer."""
    one = tokens * DIM * 2e-9
    operands = [random(tokens, DIM), random(tokens, STREAMS, DIM), positive(tokens, 4), positive(tokens, 4, 4)]
    yield Case("mHC expand", "mhc.expand", lambda f: [f(*operands)], operands, 9 * one, 14 * one)


def gate(tokens: int) -> Iterator[Case]:
    """The Engram gate."""
    one = tokens * DIM * 2e-9
    operands = [random(tokens, STREAMS, DIM), random(tokens, STREAMS, DIM), random(tokens, DIM)]
    operands += [random(STREAMS, DIM), random(STREAMS, DIM)]
    is_open = torch.rand(tokens, device="cuda") > 0.1
    yield Case("Engram gate", "engram.gate", lambda f: [f(*operands, is_open, 1e-20)], operands, 13 * one, 22 * one)


def rope(tokens: int) -> Iterator[Case]:
    """Rotary embedding of the queries."""
    q = random(tokens, HEADS, HEAD_DIM)
    turn = cos_sin(torch.arange(tokens, device="cuda"), plain_frequencies(64, 10000.0))
    moved = 2 * q.numel() * 2e-9
    yield Case("rotary, 64 heads", "rope.rotate", lambda f: [f(q, *turn)], [q], moved, moved)
    owned = [random(tokens, HEADS, HEAD_DIM).detach() for _ in range(4)]  # of one, the cache would hold what turns
    moved = 2 * 4 * tokens * HEADS * 64 * 2e-9
    name = "rotary in place, 64 heads, four"
    yield Case(name, "rope.rotate_owned", lambda f: [f(x, *turn) for x in owned], owned, moved, None)


def norm(tokens: int) -> Iterator[Case]:
    """RMSNorm of the hidden size, of query and of key latents: several at a time, so that the L2 cache holds none."""
    for size, number in ((DIM, 4), (1280, 16), (HEAD_DIM, 40)):
        xs, weight = [random(tokens, size) for _ in range(number)], random(size)
        one = number * tokens * size * 2e-9
        call = lambda f, xs=xs, weight=weight: [f(x, weight, 1e-20) for x in xs]  # noqa: E731
        yield Case(f"RMSNorm, {number} of {size}", "norm.rms_norm", call, [*xs, weight], 2 * one, 3 * one)


def swiglu(tokens: int) -> Iterator[Case]:
    """SwiGLU of all routed tokens."""
    rows = tokens * EXPERTS_PER_TOKEN
    operands = [random(rows, INNER), random(rows, INNER), positive(rows)]
    one = rows * INNER * 2e-9
    yield Case("SwiGLU", "routing.swiglu", lambda f: [f(*operands[:2], 10.0, operands[2])], operands, 3 * one, 5 * one)


def quant(tokens: int) -> Iterator[Case]:
    """Fake quantization, of as many values as the queries have."""
    x = random(tokens * HEADS, HEAD_DIM)
    for name in ("fake_fp8", "fake_mxfp4", "fake_fp4"):
        yield Case(name, f"quant.{name}", lambda f: [f(x)], [x], 2 * x.numel() * 2e-9, None)


CASES = {"site": site, "expand": expand, "gate": gate, "rope": rope, "norm": norm, "swiglu": swiglu, "quant": quant}


def lines(case: Case, tokens: int, names: list[str]) -> Iterator[list[object]]:
    """Table rows of one case, of those providers that it has."""
    for provider in [name for name in names if name in providers(case.op)]:
        function = load(case.op, provider)
        with torch.no_grad():
            timings = [("forward", case.forward_gb, device_ms(lambda: case.forward(function)))]  # noqa: B023
        if case.backward_gb is not None:
            call = backward_call(lambda: case.forward(function), case.inputs)  # noqa: B023
            timings.append(("backward", case.backward_gb, device_ms(call)))
        for direction, gigabytes, timing in timings:
            floor = gigabytes / TBPS
            share = f"{100 * floor / timing.median:.0f}%"
            yield [case.name, direction, provider, tokens, str(timing), f"{floor:.3f}", share]


def main() -> int:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--ops", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ref", action="store_true", help="time the reference ops too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_fused: there is no CUDA device to time", file=sys.stderr)
        return 1
    names = ["hopper", "triton"] if torch.cuda.get_device_capability() == (9, 0) else ["triton"]
    names += ["ref"] * args.ref
    rows = []
    for tokens in args.tokens:
        for op in args.ops:
            for case in CASES[op](tokens):
                rows += lines(case, tokens, names)
    print(table(["op", "direction", "provider", "tokens", "ms", "floor ms", "of floor"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
