"""How well a ladder predicts what it has not seen, and how much compute an arm is worth."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_dsv41.experiments.collect import Row
from megatron_dsv41.experiments.fit import Fit, Refused, cells_c, cells_nd, fit_cells, interval, main_rows
from megatron_dsv41.experiments.ladder import BASE

WIDEST = 0.05  # half of an interval, over the predicted loss: wider ones are no prediction


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One held-out point: measured is the mean over its seeds; error is predicted / measured - 1."""

    depth: int
    tokens: float
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Signed relative error."""
        return self.predicted / self.measured - 1

    @property
    def open(self) -> bool:
        """Whether the fit leaves open what the point reaches."""
        return (self.high - self.low) / 2 > WIDEST * self.predicted


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Predictions of points by fits that did not see them."""

    predictions: tuple[Prediction, ...]
    problems: tuple[str, ...]

    @property
    def signed(self) -> float:
        """Mean signed relative error."""
        return float(np.mean([p.error for p in self.predictions]))

    @property
    def unsigned(self) -> float:
        """Mean unsigned relative error."""
        return float(np.mean([abs(p.error) for p in self.predictions]))


@dataclasses.dataclass(frozen=True)
class Multiplier:
    """Compute that the base needs for an arm's loss, over what the arm needed. Above 1: the arm saves compute."""

    value: float
    low: float
    high: float
    cells: int


def leave_largest_out(rows: Sequence[Row], convention: str, arm: str = BASE) -> HeldOut:
    """Predict the deepest rung from all others: points whose interval is narrow enough to be a prediction.

    Raises Refused where there is none, or where the fit is not to be extrapolated.
    """
    rows = main_rows(rows, arm)
    largest = max((row.depth for row in rows), default=0)
    fit = fit_cells(cells_nd([row for row in rows if row.depth < largest], convention))
    if fit.problems:
        raise Refused("no extrapolation from this fit: " + "; ".join(fit.problems))
    found = _predict(fit, [row for row in rows if row.depth == largest], convention)
    left_open = [
        f"the other rungs leave depth {p.depth} with {p.tokens:.3g} tokens open: {p.low:.3g} to {p.high:.3g}"
        for p in found
        if p.open
    ]
    if len(left_open) == len(found):
        raise Refused("; ".join([*left_open, *fit.remarks]))
    return HeldOut(tuple(p for p in found if not p.open), (*left_open, *fit.remarks))


def leave_one_out(rows: Sequence[Row], convention: str, arm: str = BASE) -> HeldOut:
    """Predict every point (all of its seeds) from all other points. Raises Refused when one cannot be."""
    rows = main_rows(rows, arm)
    predictions: list[Prediction] = []
    problems: list[str] = []
    for depth, tokens in sorted({(row.depth, row.tokens) for row in rows}):
        held = [row for row in rows if (row.depth, row.tokens) == (depth, tokens)]
        fit = fit_cells(cells_nd([row for row in rows if row not in held], convention), samples=50)
        predictions += _predict(fit, held, convention)
        problems += [f"without depth {depth} at {tokens:.3g} tokens: {problem}" for problem in fit.problems]
    return HeldOut(tuple(predictions), tuple(problems))


def compute_multiplier(rows: Sequence[Row], arm: str) -> Multiplier:
    """Effective compute multiplier of an arm against the base at equal token multiples, over all of its cells.

    The base's L(C) at one token multiple says what compute reaches the arm's loss; the ratio's geometric mean is the
    value. Raises Refused when no token multiple has a base curve that reaches the arm's losses.
    """
    base, variant = main_rows(rows, BASE), main_rows(rows, arm)
    if not variant:
        raise Refused(f"arm {arm} has no finished cell")
    logs: list[float] = []
    sampled: list[np.ndarray] = []
    reasons: list[str] = []
    for size, group in _by_size(variant).items():
        try:
            fit = fit_cells(cells_c(_by_size(base).get(size, [])))
        except Refused as refusal:
            reasons.append(f"{size:g} tokens per parameter: {refusal}")
            continue
        logs += [np.log(fit.law.invert(row.loss) / row.flops) for row in group]
        sampled.append(_sampled_logs(fit, group))
    if not logs:
        raise Refused(f"arm {arm}: no base curve to compare with ({'; '.join(reasons)})")
    if not np.isfinite(logs).all():
        raise Refused(f"arm {arm} reaches losses below what the base's curve reaches with any compute")
    means = np.concatenate(sampled, axis=1).mean(axis=1)
    low, high = interval(np.exp(means).tolist())
    return Multiplier(float(np.exp(np.mean(logs))), low, high, len(logs))


def _sampled_logs(fit: Fit, group: Sequence[Row]) -> np.ndarray:
    """Log ratios under every bootstrap curve and a draw of the arm's own noise, [samples, cells]."""
    random = np.random.default_rng(1)
    noise = np.exp(random.normal(0.0, fit.noise, (len(fit.samples), len(group))))
    return np.array(
        [
            [np.log(law.invert(row.loss * factor) / row.flops) for row, factor in zip(group, factors, strict=True)]
            for law, factors in zip(fit.samples, noise, strict=True)
        ]
    )


def _predict(fit: Fit, rows: Sequence[Row], convention: str) -> tuple[Prediction, ...]:
    groups: dict[tuple[int, float, float], list[float]] = defaultdict(list)
    for row in rows:
        groups[row.depth, row.n[convention], row.tokens].append(row.loss)
    found: list[Prediction] = []
    for (depth, n, tokens), losses in sorted(groups.items()):
        value, (low, high) = fit.predict(n, tokens)
        found.append(Prediction(depth, tokens, float(np.mean(losses)), value, low, high))
    return tuple(found)


def _by_size(rows: Sequence[Row]) -> dict[float, list[Row]]:
    found: dict[float, list[Row]] = defaultdict(list)
    for row in rows:
        if row.kind == "tokens":
            found[row.size].append(row)
    return dict(found)
