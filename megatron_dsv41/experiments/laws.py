"""Scaling laws and how they are fitted: robust in log space, from several starts.

    L(N, D) = E + A / N^alpha + B / D^beta        (Hoffmann et al. 2022, approach 3)
    L(C)    = E + A / C^alpha
    power   y = k x^p                              (optimal sizes, rates and batches over compute or size)

Sizes are divided by their geometric mean before fitting, so A and B are losses at the middle of the ladder
(`Law.scale` says which) and all parameters are of order one.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Without type stubs; as Any, the rest of the file stays checked.
optimize: Any = importlib.import_module("scipy.optimize")

Array = NDArray[np.float64]
HUBER = 1e-3  # residuals of log loss beyond this count linearly
EXPONENTS = (0.15, 0.35, 0.7, 1.2)  # starts
LARGEST_EXPONENT = 4.0
REFINE_STEPS = 60


@dataclasses.dataclass(frozen=True)
class Law:
    """L = E + sum of terms `amplitude * (x / scale)^-exponent`, one per variable."""

    irreducible: float
    amplitudes: tuple[float, ...]
    exponents: tuple[float, ...]
    scale: tuple[float, ...]

    def __call__(self, *variables: Array | float) -> Array:
        """Loss at sizes; one array per variable, all of one shape."""
        terms = zip(self.amplitudes, self.exponents, self.scale, variables, strict=True)
        start = np.full(np.shape(variables[0]), self.irreducible)
        return sum((a * (np.asarray(x) / s) ** -p for a, p, s, x in terms), start=start)

    def invert(self, loss: float) -> float:
        """The size of a law in one variable at which the loss is reached; NaN below what it can reach."""
        above = loss - self.irreducible
        if above <= 0:
            return float("nan")
        return float(self.scale[0] * (self.amplitudes[0] / above) ** (1 / self.exponents[0]))

    def as_published(self) -> dict[str, float]:
        """Parameters for x itself in place of x / scale: E, A, alpha and, in two variables, B and beta."""
        found = {"E": self.irreducible}
        for a, p, s, names in zip(self.amplitudes, self.exponents, self.scale, ("A alpha", "B beta"), strict=False):
            amplitude, exponent = names.split()
            found |= {amplitude: a * s**p, exponent: p}
        return found


def fit_law(variables: Sequence[Array], loss: Array) -> Law:
    """The law with the least Huber loss of log residuals, the best of several starts.

    variables: one array of positive sizes per variable; loss: [cells] in nats.
    """
    scale = tuple(float(np.exp(np.log(x).mean())) for x in variables)
    ratios, target = _log_ratios(variables, scale), np.log(loss)
    starts = _starts(ratios, loss)
    vectors, costs = _refine(starts, ratios, np.tile(target, (len(starts), 1)))
    return _to_law(_descend(vectors[np.argmin(costs)], ratios, target), scale)


def refit_law(law: Law, variables: Sequence[Array], losses: Array) -> tuple[Law, ...]:
    """Fits to many loss vectors [samples, cells] that differ little from the law's own: all at once, from `law`."""
    ratios = _log_ratios(variables, law.scale)
    vectors, _ = _refine(np.tile(_to_vector(law), (len(losses), 1)), ratios, np.log(losses))
    return tuple(_to_law(vector, law.scale) for vector in vectors)


def log_residuals(law: Law, variables: Sequence[Array], loss: Array) -> Array:
    """log measured - log predicted: about the signed relative error."""
    return np.log(loss) - np.log(law(*variables))


def sensitivity(law: Law, variables: Sequence[Array]) -> Array:
    """Derivatives of log loss by (log E, log amplitudes, exponents), [cells, parameters]."""
    return _jacobian(_to_vector(law), _log_ratios(variables, law.scale))


def fit_power(x: Array, y: Array) -> tuple[float, float]:
    """(k, p) of y = k x^p by least squares of logs."""
    power, log_k = np.polyfit(np.log(x), np.log(y), 1)
    return float(np.exp(log_k)), float(power)


def _starts(ratios: Array, loss: Array) -> Array:
    """For every combination of exponents the best non-negative E and amplitudes, [starts, parameters]."""
    found: list[Array] = []
    for exponents in itertools.product(EXPONENTS, repeat=len(ratios)):
        columns = np.exp(-np.array(exponents)[:, None] * ratios)
        linear: Array = optimize.nnls(np.vstack([np.ones_like(loss), columns]).T, loss)[0]
        found.append(np.concatenate([np.log(np.maximum(linear, 1e-3 * loss.min())), exponents]))
    return np.stack(found)


def _refine(vectors: Array, ratios: Array, targets: Array) -> tuple[Array, Array]:
    """Parameters [samples, parameters] and Huber costs [samples] near minima, from `vectors`.

    Levenberg-Marquardt with Huber's weights; every sample has its own damping. Far faster per sample than a
    call of scipy each, which bootstrap needs.
    """
    lower, upper = _bounds(len(ratios))
    damping = np.full(len(targets), 1e-3)
    costs = _huber(_predicted(vectors, ratios) - targets)
    for _ in range(REFINE_STEPS):
        residuals = _predicted(vectors, ratios) - targets
        jacobians = _jacobian(vectors, ratios)
        weighted = jacobians * (HUBER / np.maximum(np.abs(residuals), HUBER))[..., None]
        normal: Array = np.einsum("scp,scq->spq", weighted, jacobians)
        diagonal: Array = np.einsum("spp->sp", normal) * damping[:, None] + 1e-15
        slope: Array = np.einsum("scp,sc->sp", weighted, residuals)
        normal += diagonal[:, :, None] * np.eye(vectors.shape[1])
        tried: Array = np.clip(vectors - np.linalg.solve(normal, slope[..., None])[..., 0], lower, upper)
        found = _huber(_predicted(tried, ratios) - targets)
        better = found < costs
        settled = np.where(better, costs - found <= 1e-9 * costs, damping > 1)
        vectors, costs = np.where(better[:, None], tried, vectors), np.where(better, found, costs)
        damping = np.where(better, damping * 0.2, np.minimum(damping * 5, 1e6))
        if settled.all():
            break
    return vectors, costs


def _descend(vector: Array, ratios: Array, target: Array) -> Array:
    """The minimum next to `vector`, which is close to it."""
    lower, upper = _bounds(len(ratios))

    def residuals(vector: Array) -> Array:
        return _predicted(vector, ratios) - target

    def jacobian(vector: Array) -> Array:
        return _jacobian(vector, ratios)

    result = optimize.least_squares(
        residuals,
        np.clip(vector, lower + 1e-6, upper - 1e-6),
        jac=jacobian,
        bounds=(lower, upper),
        loss="huber",
        f_scale=HUBER,
        x_scale="jac",
        max_nfev=30,
    )
    found: Array = result.x
    return found


# A parameter vector is (log E, log amplitudes, exponents). Leading dimensions of vectors are samples.


def _bounds(count: int) -> tuple[Array, Array]:
    lower = np.array([-12.0] * (1 + count) + [1e-3] * count)
    return lower, np.array([12.0] * (1 + count) + [LARGEST_EXPONENT] * count)


def _terms(vector: Array, ratios: Array) -> Array:
    """log of E and of every term, [..., cells, 1 + variables]."""
    count, cells = ratios.shape
    constant = np.broadcast_to(vector[..., None, :1], (*vector.shape[:-1], cells, 1))
    return np.concatenate([constant, vector[..., None, 1 : 1 + count] - vector[..., None, 1 + count :] * ratios.T], -1)


def _predicted(vector: Array, ratios: Array) -> Array:
    """log loss, [..., cells]."""
    return np.logaddexp.reduce(_terms(vector, ratios), axis=-1)


def _jacobian(vector: Array, ratios: Array) -> Array:
    """Of log loss by the vector, [..., cells, parameters]."""
    terms = _terms(vector, ratios)
    shares = np.exp(terms - np.logaddexp.reduce(terms, axis=-1, keepdims=True))
    return np.concatenate([shares, -shares[..., 1:] * ratios.T], -1)


def _huber(residuals: Array) -> Array:
    size = np.abs(residuals)
    return np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2)).sum(-1)


def _log_ratios(variables: Sequence[Array], scale: Sequence[float]) -> Array:
    """log(x / scale), [variables, cells]."""
    return np.stack([np.log(x) - np.log(s) for x, s in zip(variables, scale, strict=True)])


def _to_vector(law: Law) -> Array:
    return np.concatenate([np.log([law.irreducible, *law.amplitudes]), law.exponents])


def _to_law(vector: Array, scale: tuple[float, ...]) -> Law:
    count = len(scale)
    return Law(
        irreducible=float(np.exp(vector[0])),
        amplitudes=tuple(map(float, np.exp(vector[1 : 1 + count]))),
        exponents=tuple(map(float, vector[1 + count :])),
        scale=scale,
    )
