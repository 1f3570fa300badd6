"""Best sizes from parabolas: iso-FLOP profiles, and sweeps of learning rate and batch. A minimum at the edge of what
was tried is no minimum and is refused."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from megatron_dsv41.experiments.collect import Row
from megatron_dsv41.experiments.fit import Refused, interval
from megatron_dsv41.experiments.ladder import BASE
from megatron_dsv41.experiments.laws import Array, fit_power

LEAST_POINTS = 4  # of a parabola: one more than it has parameters
LEAST_MINIMA = 3  # of a power law through them


@dataclasses.dataclass(frozen=True)
class Parabola:
    """Loss = a (log x - log best)^2 + least, with a > 0 and `best` inside what was tried."""

    best: float
    least: float
    curvature: float
    points: tuple[tuple[float, float], ...]  # (x, mean loss)

    def __call__(self, x: Array) -> Array:
        """Loss at sizes."""
        return self.curvature * (np.log(x) - np.log(self.best)) ** 2 + self.least


@dataclasses.dataclass(frozen=True)
class MinimumLaw:
    """best = k x^p over profiles, with the interval of p over seeds."""

    k: float
    power: float
    power_interval: tuple[float, float]


def fit_parabola(points: Iterable[tuple[float, float]]) -> Parabola:
    """Through (x, loss) pairs; equal x are averaged. Raises Refused."""
    groups: dict[float, list[float]] = defaultdict(list)
    for x, loss in points:
        groups[x].append(loss)
    means = tuple((x, float(np.mean(groups[x]))) for x in sorted(groups))
    if len(means) < LEAST_POINTS:
        raise Refused(f"a parabola needs at least {LEAST_POINTS} sizes, got {len(means)}")
    x, y = (np.array(values) for values in zip(*means, strict=True))
    curvature, slope, _ = (float(value) for value in np.polyfit(np.log(x), y, 2))
    if curvature <= 0:
        raise Refused("the profile has no minimum: it bends downwards")
    middle = -slope / (2 * curvature)
    best = float(np.exp(middle))
    if not x[0] < best < x[-1]:
        raise Refused(f"the minimum at {best:.3g} lies outside the sizes {x[0]:.3g} to {x[-1]:.3g} that were tried")
    least = float(np.polyval(np.polyfit(np.log(x), y, 2), middle))
    return Parabola(best, least, curvature, means)


def iso_flop_profiles(rows: Sequence[Row]) -> dict[float, list[Row]]:
    """Rows of the iso-FLOP grid by budget, those of equal budget together."""
    found: dict[float, list[Row]] = defaultdict(list)
    for row in rows:
        if row.arm == BASE and row.kind == "flops":
            found[row.size].append(row)
    return dict(sorted(found.items()))


def sweep_profiles(rows: Sequence[Row], what: str) -> dict[float, list[Row]]:
    """Rows of a sweep of `lr` or `batch` by active parameters, the unvaried cell included."""
    other = "batch_factor" if what == "lr" else "lr_factor"
    varied = [row for row in rows if row.arm == BASE and row.kind == "tokens" and getattr(row, other) == 1]
    sizes = {(row.depth, row.size) for row in varied if getattr(row, f"{what}_factor") != 1}
    found: dict[float, list[Row]] = defaultdict(list)
    for row in varied:
        if (row.depth, row.size) in sizes:
            found[row.n["active"]].append(row)
    return dict(sorted(found.items()))


def fit_minimum_law(
    profiles: dict[float, list[Row]], x_of: Callable[[Row], float], *, samples: int = 200, seed: int = 0
) -> MinimumLaw:
    """Power law of the minima over the profiles' keys. Raises Refused."""
    best = _minima(profiles, x_of)
    if len(best) < LEAST_MINIMA:
        raise Refused(f"a law of minima needs at least {LEAST_MINIMA} profiles with one, got {len(best)}")
    k, power = fit_power(np.array(list(best)), np.array(list(best.values())))
    random, powers = np.random.default_rng(seed), list[float]()
    for _ in range(samples):
        drawn = _minima({key: _resampled(rows, random) for key, rows in profiles.items()}, x_of)
        if len(drawn) >= LEAST_MINIMA:
            powers.append(fit_power(np.array(list(drawn)), np.array(list(drawn.values())))[1])
    return MinimumLaw(k, power, interval(powers) if powers else (float("nan"), float("nan")))


def _minima(profiles: dict[float, list[Row]], x_of: Callable[[Row], float]) -> dict[float, float]:
    found: dict[float, float] = {}
    for key, rows in profiles.items():
        try:
            found[key] = fit_parabola((x_of(row), row.loss) for row in rows).best
        except Refused:
            continue
    return found


def _resampled(rows: Sequence[Row], random: np.random.Generator) -> list[Row]:
    """Seeds drawn with replacement within equal cells."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.cell.rsplit("-s", 1)[0]].append(row)
    return [group[i] for group in groups.values() for i in random.integers(len(group), size=len(group))]
