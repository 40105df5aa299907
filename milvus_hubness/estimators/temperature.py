"""Temperatures: tau in units of the score, or a temperature in units of the spread of the bank's scores.

Vectors of twice the length score four times as high, so that no tau suits every collection. An estimator with
a temperature gets its tau when it is fitted: temperature · spread. The fitted estimator has both; its tau is
kept with the biases, and the next fit measures the spread again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from milvus_hubness.banks import QueryBank, Vectors, as_vectors
from milvus_hubness.errors import InvalidInput, InvalidParameter
from milvus_hubness.kernels.arguments import positive_number

TEMPERATURE_OF = {
    "tau": "temperature",
    "tau_query": "temperature_query",
    "tau_target": "temperature_target",
}
"""The parameter in units of the spread, by that in units of the score."""

QUERIES, ITEMS = 1_000, 20_000
"""How many of each the spread is measured on, at most."""

Kind = TypeVar("Kind")


def score_spread(bank: QueryBank, gallery: Vectors) -> float:
    """Return the standard deviation of a bank query's scores over the items, the root mean square of
    1,000 queries and 20,000 items of the gallery (n, d), spread evenly; 0 where all items score alike."""
    queries, items = _evenly(bank.vectors, QUERIES), _evenly(gallery, ITEMS)
    centred = items - items.mean(0)
    spread = np.sqrt(np.mean((queries @ (centred.T @ centred / len(items))) * queries, 0).sum())
    largest = np.abs(queries @ items[:QUERIES].T).max()
    return float(spread) if spread > 1e-6 * largest else 0.0


def set_temperatures(estimator: Any, defaults: Mapping[str, float]) -> None:
    """Check each tau and temperature of a dataclass under construction; where neither is given, set the
    default of that temperature. Raises InvalidParameter."""
    for tau, temperature in _pairs(estimator):
        given = [name for name in (tau, temperature) if getattr(estimator, name) is not None]
        for name in given:
            object.__setattr__(estimator, name, positive_number(name, getattr(estimator, name)))
        if not given:
            object.__setattr__(estimator, temperature, defaults[temperature])


def has_temperature(estimator: Any) -> bool:
    """Return whether a fit has to measure the spread."""
    return any(getattr(estimator, temperature) is not None for _, temperature in _pairs(estimator))


def measured(estimator: Kind, bank: QueryBank, gallery: npt.ArrayLike | None) -> Kind:
    """Return the estimator with the taus of its temperatures on this bank and gallery (n, d).

    Where all items score alike every tau ranks them alike: then the unit is the root mean square score, or 1
    where all scores are 0. Raises InvalidInput without a gallery where there is a temperature.
    """
    if not has_temperature(estimator):
        return estimator
    if gallery is None:
        raise InvalidInput(
            f"{type(estimator).__name__} with a temperature measures the gallery's scores: "
            "pass gallery=…, or an absolute tau"
        )
    items = as_vectors(gallery, "the gallery")
    bank.expect_dim(items.shape[1], "the gallery")
    unit = score_spread(bank, items)
    unit = unit or float(np.sqrt(np.mean((bank.vectors[:QUERIES] @ items[:QUERIES].T) ** 2))) or 1.0
    return _replaced(
        estimator,
        {
            tau: value * unit
            for tau, temperature in _pairs(estimator)
            if (value := getattr(estimator, temperature))
        },
    )


def unmeasured(estimator: Kind) -> Kind:
    """Return the estimator as before its fit: without the taus that follow from temperatures, and without the
    number of items."""
    pairs, counted = _pairs(estimator), getattr(estimator, "items", None) is not None
    changes = {tau: None for tau, name in pairs if getattr(estimator, name) is not None}
    return _replaced(estimator, changes | ({"items": None} if counted else {}))


def at_its_tau(estimator: Kind) -> Kind:
    """Return the estimator without its temperatures. Raises InvalidParameter where one has no tau yet."""
    for tau, _ in _pairs(estimator):
        tau_of(estimator, tau)
    return _replaced(estimator, {temperature: None for _, temperature in _pairs(estimator)})


def tau_of(estimator: Any, name: str = "tau") -> float:
    """Return that tau. Raises InvalidParameter where no fit has measured it yet."""
    tau: float | None = getattr(estimator, name)
    if tau is None:
        raise InvalidParameter(f"{estimator!r} has no {name} yet: fit it, or take the estimator of the fit")
    return tau


def _pairs(estimator: Any) -> list[tuple[str, str]]:
    """The names of each tau and its temperature."""
    names = {field.name for field in fields(estimator)}
    return [pair for pair in TEMPERATURE_OF.items() if pair[0] in names]


def _replaced(estimator: Kind, changes: Mapping[str, float | None]) -> Kind:
    changed: Any = estimator
    return cast(Kind, replace(changed, **changes) if changes else estimator)


def _evenly(rows: Vectors, most: int) -> npt.NDArray[np.float64]:
    places = np.linspace(0, len(rows) - 1, min(most, len(rows)), dtype=np.int64)
    return rows[places].astype(np.float64)
