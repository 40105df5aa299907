"""The hub guard: when a new row would answer so many queries that it looks like a planted hub.

Numbers only. The *reach* of a row is the share of bank queries for which its score is above the mean
of the ten best scores of the fitted gallery, so the share of queries whose top ten it would enter.
A fit of RelativeNNN, which the default Blend contains, has these means. Without them the bias itself
takes the place of the reach.

A universal hub reaches 40 to 100% of the bank, where the gallery's rows reach 3 to 30% at most. The
bias alone separates them less well: it is large for popular rows, too. `benchmarks.guard` compares
both.

Many weak hubs do together what one strong one does. So the rows of one writer count together: those
with the largest reaches may have no larger mean than as many rows of the gallery would by chance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field

from milvus_hubness.basics.bounds import MOST_ROWS, FrozenModel, Number
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.errors import InvalidParameter

LEVELS = (
    0.0,
    0.01,
    0.05,
    0.1,
    0.25,
    0.5,
    0.75,
    0.9,
    0.95,
    0.98,
    0.99,
    0.995,
    0.998,
    0.999,
    0.9995,
    1.0,
)
"""The quantiles of the gallery that are stored; those between follow from their neighbours."""

FEWEST_ROWS = 200
"""Rows from which on quantiles are measured: of fewer, the largest says little of the next row."""

MOST_MEASURED = 20_000
"""Rows on which quantiles are measured; of more, so many are drawn."""

FALSE_ALARMS = 0.001
"""Share of genuine rows that may be stopped."""

REACH_MARGIN = 2.25
"""A row is stopped whose reach is this many times that of the quantile.

Rows that join a gallery have a longer tail than those that a fit has seen. Chosen on
docstring_code, caption_document and text_video_msrvtt t2v as the smallest of 1.5, 2, 2.25 and 2.5
that stops at most 0.1% of the genuine rows of a fresh half of each.
"""

TAIL_LEVEL = 0.99
LONGEST_TAIL = 3.0
"""The largest multiple of the reach at TAIL_LEVEL that higher quantiles count for.

So hubs that were planted before the gallery was measured, up to a hundredth of its rows, do not raise
the limit above themselves. On the galleries of `benchmarks.guard`, the quantile 0.999 is 1.1 to 2.5
times that of 0.99.
"""
FREE_TAIL = 0.1
"""A reach up to which quantiles count as they are: a small bank has coarse ones."""

MOST_RISE = 0.1
"""Share by which the limit may be above that before a refit.

The rows that were let in since are among those that are measured: it must not follow them.
"""

REMEMBERED = 200
"""Rows of a writer, before those of a write, that count with these."""

BIAS_MARGIN = 0.2
"""Where there is no reach, a row is stopped whose bias is above the quantile by this part of the
quantile's distance from the median. Chosen on the same tasks, of 0.1, 0.2 and 0.3.
"""


def _ascending(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(values) not in (0, len(LEVELS)) or any(np.diff(values) < 0):
        raise InvalidParameter(f"quantiles are {len(LEVELS)} ascending numbers")
    return values


Quantiles = Annotated[tuple[Number, ...], AfterValidator(_ascending)]
"""The values at LEVELS; empty where they were not measured."""


class Evidence(FrozenModel):
    """What the rows of a gallery look like, for the comparison with a new one."""

    rows: int = Field(ge=1, le=MOST_ROWS)
    """The number of rows that were measured."""
    biases: Annotated[Quantiles, Field(min_length=len(LEVELS))]
    """Quantiles of their biases, centred as they are stored, without a prior."""
    reaches: Quantiles = ()
    """Quantiles of their reaches; empty if the estimator keeps no scores of the gallery."""
    ceiling: Number | None = None
    """The largest that the limit may be, from the refit before; None for the first fit."""

    @classmethod
    def of(cls, biases: Floats, reaches: Floats | None) -> Evidence | None:
        """Return the quantiles of biases (n,) and reaches (n,); None of fewer than 200 rows."""
        if len(biases) < FEWEST_ROWS:
            return None
        return cls(
            rows=len(biases),
            biases=_quantiles(biases),
            reaches=() if reaches is None else _quantiles(reaches),
        )

    def after(self, former: Evidence | None) -> Evidence:
        """Return the evidence of a refit, whose limit stays near that of the former one.

        Biases are no reaches, and bound no limit of these, nor the other way round.
        """
        if former is None or bool(former.reaches) != bool(self.reaches):
            return self
        return self.model_copy(update={"ceiling": former.limit + MOST_RISE * abs(former.limit)})

    @property
    def limit(self) -> float:
        """The reach, or without reaches the bias, above which a row is stopped."""
        if self.reaches:
            limit = REACH_MARGIN * float(self._reach_at(1 - FALSE_ALARMS))
        else:
            quantile = _at(self.biases, 1 - FALSE_ALARMS)
            limit = quantile + BIAS_MARGIN * (quantile - _at(self.biases, 0.5))
        return limit if self.ceiling is None else min(limit, self.ceiling)

    def limits_of_means(self, count: int) -> npt.NDArray[np.float64]:
        """Return the limits of the mean reach of the 1, 2, … rows of `count` with the largest, (count,).

        j such rows of the gallery have the mean e_j of its upper quantiles, and any j rows are nearer
        to it the more they are: e_j + (q − e_j) / √j, with the quantile q that is the limit of one row.
        """
        levels = 1 - (np.arange(count) + 0.5) / count
        numbers = 1 + np.arange(count)
        expected = np.cumsum(self._reach_at(levels)) / numbers
        of_one = self.limit / REACH_MARGIN
        expected = np.minimum(expected, of_one)
        return np.asarray(REACH_MARGIN * (expected + (of_one - expected) / np.sqrt(numbers)))

    def _reach_at(self, levels: float | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the quantiles of the reach, but for hubs that were in the gallery before."""
        longest = max(FREE_TAIL, LONGEST_TAIL * _at(self.reaches, TAIL_LEVEL))
        quantiles = np.interp(np.asarray(levels), LEVELS, self.reaches)
        return np.asarray(np.minimum(quantiles, longest))

    def bias_quantile(self, bias: float) -> float:
        """Return the share of the gallery's rows with a bias of at most this one."""
        return float(np.interp(bias, self.biases, LEVELS))


class RowEvidence(NamedTuple):
    """What there is to say of n rows that are written: their `RowMeasures`, and their writer."""

    biases: Floats
    reaches: Floats | None
    writer: deque[float] | None = None
    """The reaches of the rows that the same writer wrote before, at most REMEMBERED; None if nobody
    remembers them."""

    def stopped(self, evidence: Evidence) -> npt.NDArray[np.int64]:
        """Return the positions of the rows that look like hubs next to this gallery, alone or together
        with others of their writer.
        """
        measured = self.reaches if evidence.reaches else self.biases
        # The fit has changed its kind since the gallery was measured: its quantiles do not apply.
        if measured is None:
            return np.empty(0, np.int64)
        alone = measured > evidence.limit
        if not evidence.reaches:
            return np.flatnonzero(alone)

        rest = np.flatnonzero(~alone)
        together = rest[self._together(measured[rest].astype(np.float64), evidence)]
        return np.union1d(np.flatnonzero(alone), together)

    def _together(
        self, reaches: npt.NDArray[np.float64], evidence: Evidence
    ) -> npt.NDArray[np.int64]:
        """Return the positions among rows (n,) of those that are too many for such reaches."""
        before = np.array(self.writer or (), np.float64)
        every = np.concatenate([reaches, before])
        if not len(every):
            return np.empty(0, np.int64)
        order = np.argsort(-every, kind="stable")
        means = np.cumsum(every[order]) / (1 + np.arange(len(every)))
        excess = means / evidence.limits_of_means(len(every))
        # As many of the largest as stand out most: a row that any writer may have is not one of them.
        most = int(np.argmax(excess))
        if excess[most] <= 1:
            return np.empty(0, np.int64)
        chosen = order[: most + 1]
        return chosen[chosen < len(reaches)]

    def remember(self) -> None:
        """Note that the rows were written."""
        if self.writer is not None and self.reaches is not None:
            self.writer.extend(self.reaches.tolist())


def reach_of(products: npt.NDArray[np.floating[Any]], finds: Floats) -> Floats:
    """Return the share of m queries whose `finds` are below the row's score, (n,) float32.

    products: (n, m). finds: (m,), or (n, m) for others of each row.
    """
    # Row by row: along an axis, NumPy counts several times slower.
    counts = [np.count_nonzero(above) for above in products > finds]
    return np.asarray(counts, np.float32) / np.float32(finds.shape[-1])


def _quantiles(values: Floats) -> tuple[float, ...]:
    ascending = np.quantile(np.asarray(values, np.float64), LEVELS)
    # Rounded in float64, they may descend in the last place.
    return tuple(round(float(value), 8) for value in np.maximum.accumulate(ascending))


def _at(quantiles: Sequence[float], level: float) -> float:
    return float(np.interp(level, LEVELS, quantiles))
