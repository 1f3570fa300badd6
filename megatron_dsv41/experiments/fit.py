"""Fits of a ladder's rows: L(N, D) under every convention of N, and L(C), with intervals from bootstrap over seeds.

Too few or degenerate cells are refused with the reason (`Refused`); a form that the seeds' noise cannot explain is
flagged. Refusing is an answer: an extrapolation from such cells would be a guess.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_dsv41.experiments.collect import Row
from megatron_dsv41.experiments.laws import (
    LARGEST_EXPONENT,
    Array,
    Law,
    fit_law,
    log_residuals,
    refit_law,
    sensitivity,
)

stats: Any = importlib.import_module("scipy.stats")  # without type stubs

LEVEL = 0.95
LEAST_VALUES = 3  # distinct sizes per variable
LARGEST_CORRELATION = 0.98  # of log N and log D: beyond it the two terms cannot be told apart
LARGEST_CONDITION = 1e4
WRONG_FORM = 0.01  # p-value of the lack-of-fit test below which the form is flagged
LARGEST_MISFIT = 0.02  # of log losses: a flagged form that is closer is used, with intervals from its residuals


class Refused(ValueError):
    """There is no fit that could be trusted; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Cells:
    """Points to fit: equal sizes with other seeds are one group."""

    names: tuple[str, ...]  # of the variables
    variables: tuple[Array, ...]
    loss: Array

    @property
    def groups(self) -> dict[tuple[float, ...], list[int]]:
        """Indices of cells by their sizes."""
        found: dict[tuple[float, ...], list[int]] = defaultdict(list)
        for index, sizes in enumerate(zip(*self.variables, strict=True)):
            found[tuple(map(float, sizes))].append(index)
        return dict(found)

    def __len__(self) -> int:
        return len(self.loss)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A fitted law and how far it can be trusted. Intervals hold `LEVEL`."""

    law: Law
    cells: Cells
    samples: tuple[Law, ...]  # bootstrap
    noise: float  # standard deviation of log loss between seeds; of residuals when no cell has two, or in a wrong form
    lack_of_fit: float | None  # p-value; None: no cell has two seeds, so form and noise cannot be told apart
    problems: tuple[str, ...]  # extrapolate only when empty
    remarks: tuple[str, ...] = ()  # what a reader of the parameters must know

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Low and high end of every published parameter."""
        values = [sample.as_published() for sample in self.samples]
        return {name: interval([v[name] for v in values]) for name in self.law.as_published()}

    def predict(self, *sizes: float) -> tuple[float, tuple[float, float]]:
        """Loss at sizes with the interval of its mean over seeds."""
        value = float(self.law(*(np.array(size) for size in sizes)))
        return value, interval([float(sample(*(np.array(size) for size in sizes))) for sample in self.samples])


def cells_nd(rows: Sequence[Row], convention: str) -> Cells:
    """Rows as points (N, D)."""
    sizes = (np.array([row.n[convention] for row in rows], float), np.array([row.tokens for row in rows], float))
    return Cells(("N", "D"), sizes, np.array([row.loss for row in rows], float))


def cells_c(rows: Sequence[Row]) -> Cells:
    """Rows as points of training compute."""
    return Cells(("C",), (np.array([row.flops for row in rows], float),), np.array([row.loss for row in rows], float))


def main_rows(rows: Sequence[Row], arm: str) -> list[Row]:
    """Rows of an arm at the ruled learning rate and batch."""
    return [row for row in rows if row.arm == arm and row.lr_factor == 1 and row.batch_factor == 1]


def fit_cells(cells: Cells, *, samples: int = 200, seed: int = 0) -> Fit:
    """Fit the law of as many variables as the cells have. Raises Refused."""
    _check_enough(cells)
    law = fit_law(cells.variables, cells.loss)
    residuals = log_residuals(law, cells.variables, cells.loss)
    seeds = seed_deviations(cells)
    p_value = lack_of_fit(cells, residuals)
    wrong = p_value is not None and p_value < WRONG_FORM
    parameters, groups = 1 + 2 * len(cells.variables), list(cells.groups.values())
    if wrong:  # what the form misses, cells of one size miss together
        means = np.array([residuals[indices].mean() for indices in groups])
        pool, freedom = means * math.sqrt(len(groups) / (len(groups) - parameters)), len(groups) - parameters
    elif len(seeds):
        pool, freedom = seeds, len(seeds) - _replicated(cells)
    else:
        pool, freedom = residuals * math.sqrt(len(cells) / (len(cells) - parameters)), len(cells) - parameters
    noise = float(np.sqrt(np.mean(pool**2)))
    # Few degrees of freedom know the noise badly: the pool is widened as Student's t widens a normal interval.
    pool = pool * float(stats.t.ppf(0.5 + LEVEL / 2, freedom) / 1.96)
    together = groups if wrong else [[index] for index in range(len(cells))]
    problems, remarks = _not_falling(law, cells), _undetermined(law, cells)
    if wrong:
        beyond = f"it misses {noise:.2%}, more than seeds explain (p = {p_value:.2g})"
        text = f"the form does not describe the cells: {beyond}"
        (problems if noise > LARGEST_MISFIT else remarks).append(text)
    drawn = _bootstrap(law, cells, pool, together, samples, seed)
    return Fit(law, cells, drawn, noise, p_value, tuple(problems), tuple(remarks))


def seed_deviations(cells: Cells) -> Array:
    """Deviations of log loss from the mean of equal cells, scaled to the spread of a single cell."""
    found = [np.empty(0)]
    for indices in cells.groups.values():
        if len(indices) > 1:
            values = np.log(cells.loss[indices])
            found.append((values - values.mean()) * math.sqrt(len(indices) / (len(indices) - 1)))
    return np.concatenate(found)


def lack_of_fit(cells: Cells, residuals: Array) -> float | None:
    """p-value of the F test of group means' residuals against the spread between seeds."""
    groups = list(cells.groups.values())
    free_form = len(groups) - (1 + 2 * len(cells.variables))
    free_noise = len(cells) - len(groups)
    if free_noise == 0 or free_form <= 0:
        return None
    means = np.array([residuals[indices].mean() for indices in groups])
    sizes = np.array([len(indices) for indices in groups])
    form = float((sizes * means**2).sum()) / free_form
    noise = float(sum(((residuals[i] - residuals[i].mean()) ** 2).sum() for i in groups)) / free_noise
    return float(stats.f.sf(form / max(noise, 1e-300), free_form, free_noise))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Percentile interval of bootstrap values at `LEVEL`."""
    low, high = np.nanpercentile(values, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)


def _replicated(cells: Cells) -> int:
    return sum(len(indices) > 1 for indices in cells.groups.values())


def _bootstrap(
    law: Law, cells: Cells, pool: Array, together: Sequence[Sequence[int]], samples: int, seed: int
) -> tuple[Law, ...]:
    """Refits of the law's own losses with noise drawn from the pool, one draw for the cells of each of `together`."""
    random = np.random.default_rng(seed)
    mean, shape = law(*cells.variables), (samples, len(together))
    draws = random.choice(pool, shape) * random.choice([-1.0, 1.0], shape)
    noise = np.empty((samples, len(cells)))
    for number, indices in enumerate(together):
        noise[:, indices] = draws[:, number, None]
    return refit_law(law, cells.variables, mean * np.exp(noise))


def _check_enough(cells: Cells) -> None:
    names, parameters = f"L({', '.join(cells.names)})", 1 + 2 * len(cells.variables)
    points = len(cells.groups)
    if points <= parameters:
        raise Refused(f"{names} has {parameters} parameters and needs more different cells than that, got {points}")
    for name, sizes in zip(cells.names, cells.variables, strict=True):
        values = len(set(sizes.tolist()))
        if values < LEAST_VALUES:
            raise Refused(f"{names} needs at least {LEAST_VALUES} values of {name}, got {values}")
    if len(cells.variables) == 2:
        n, d = (np.log(sizes) for sizes in cells.variables)
        correlation = abs(float(np.corrcoef(n, d)[0, 1]))
        if correlation > LARGEST_CORRELATION:
            raise Refused(
                f"{names}: N and D grow together (correlation {correlation:.3f} of their logs), so their terms cannot "
                "be told apart: train several token multiples, or fit L(C)"
            )


def _not_falling(law: Law, cells: Cells) -> list[str]:
    """Terms that are no power law of their size."""
    return [
        f"the loss does not fall with {name} as a power law: exponent {exponent:.3g}"
        for name, exponent, amplitude in zip(cells.names, law.exponents, law.amplitudes, strict=True)
        if not 0.01 < exponent < 0.95 * LARGEST_EXPONENT or amplitude < 1e-4 * law.irreducible
    ]


def _undetermined(law: Law, cells: Cells) -> list[str]:
    """Parameters that may trade against each other. What they say together, a loss, may be known well all the same."""
    condition = float(np.linalg.cond(sensitivity(law, cells.variables)))
    if condition <= LARGEST_CONDITION:
        return []
    return [f"the cells do not determine single parameters (condition number {condition:.1g})"]
