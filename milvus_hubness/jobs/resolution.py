"""How finely the augmented form tells the nearest rows of a query apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from milvus_hubness.errors import CannotMigrate
from milvus_hubness.halves import Dtype, decode, rounded
from milvus_hubness.layout import Floats, Layout
from milvus_hubness.state import form_of

MEASURED_ROWS, MEASURED_QUERIES, NEAREST = 1_000, 200, 10
ALIKE = 1e-6
"""Scores that differ by no larger a share are one to a raw search in float32 too."""
LEAST_IN_ORDER, REMARKED = 0.5, 0.99
"""Where a smaller share keeps the order: under L2 rows are not told apart; a plan says so."""

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Resolution:
    """On `rows` rows and `queries` queries: in_order, the share of the queries whose ten nearest are in the
    raw order at strength 0; gap, by how much neighbours among them differ in score (L2: squared distance),
    and error, by how much the augmented form's score is off, both in the median."""

    rows: int
    queries: int
    in_order: float
    gap: float
    error: float

    def require(self, field: str) -> None:
        """Raises CannotMigrate where the augmented form does not tell rows apart under L2."""
        if self.in_order < LEAST_IN_ORDER:
            raise CannotMigrate(
                f"field {field!r} has rows that float32 does not tell apart: the {NEAREST} nearest of a "
                f"query differ by {self.gap:.3g} in squared distance and scores are off by {self.error:.3g}, "
                f"as groups of rows lie far apart ({self.in_order:.0%} of {self.queries} queries keep their "
                f"order among {self.rows:,} rows at strength 0): keep each group in a collection of its own"
            )

    def remark(self, dtype: Dtype) -> list[str]:
        """What a plan says of it."""
        if self.in_order >= REMARKED:
            return []
        reason = "" if dtype == "float32" else f", as the augmented form is rounded to {dtype} once more"
        return [
            f"at strength 0 {self.in_order:.0%} of {self.queries} queries keep the order of their {NEAREST} "
            f"nearest among {self.rows:,} rows{reason}"
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)


def resolution(layout: Layout, vectors: Floats, queries: Floats, dtype: Dtype) -> Resolution | None:
    """Measure it on at most MEASURED_ROWS vectors (n, d) and MEASURED_QUERIES queries (m, d), spread evenly,
    as a server computes in float32. None where there are fewer than a dozen usable rows, or no query."""
    rows = _some(vectors[~layout.invalid(vectors)], MEASURED_ROWS)
    query_vectors = rounded(_some(queries[~layout.invalid(queries)], MEASURED_QUERIES), dtype)
    if len(rows) < NEAREST + 2 or not len(query_vectors):
        return None
    layout = layout.measured_on(rows, query_vectors)
    form = form_of(layout, dtype)
    stored = decode(form.encode_rows(layout.augment(rows, np.zeros(len(rows)))), dtype)
    products = decode(form.encode_queries(layout.encode_queries(query_vectors, 0.0)), dtype) @ stored.T
    found = layout.scores(products, query_vectors, 0.0) * (-1 if layout.metric == "L2" else 1)
    exact = _exact(layout, rows, query_vectors)
    order = np.argsort(-exact, axis=1, kind="stable")[:, : NEAREST + 1]
    nearest = np.take_along_axis(exact, order, 1)
    theirs = np.argsort(-found, axis=1, kind="stable")[:, :NEAREST]
    same = np.isclose(np.take_along_axis(exact, theirs, 1), nearest[:, :NEAREST], rtol=ALIKE, atol=0)
    gaps = -np.diff(nearest, axis=1)
    errors = np.abs(np.take_along_axis(found, order, 1) - nearest)
    return Resolution(
        len(rows),
        len(query_vectors),
        float(same.all(axis=1).mean()),
        float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 0.0,
        float(np.median(errors)),
    )


def _exact(layout: Layout, rows: Floats, queries: Floats) -> Scores:
    """(m, n) scores of the user's metric, the higher the nearer, in float64."""
    wide, query_vectors = rows.astype(np.float64), queries.astype(np.float64)
    if layout.metric == "L2":
        return -np.stack([np.square(wide - query).sum(axis=1) for query in query_vectors])
    if layout.metric == "COSINE":
        wide, query_vectors = (
            each / np.linalg.norm(each, axis=1, keepdims=True) for each in (wide, query_vectors)
        )
    return np.asarray(query_vectors @ wide.T)


def _some(rows: Floats, count: int) -> Floats:
    return rows[:: max(1, -(-len(rows) // count))]
