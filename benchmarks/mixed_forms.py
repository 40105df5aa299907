"""R@1 in galleries of two kinds of items, in memory: what corrections by kind of several forms add to a Blend.

    python -m benchmarks.mixed_forms [gallery …]

The galleries are those of MIXED in `benchmarks.mixed_galleries`. Scores are standardised by the statistics of their
kind, or vectors are compared less the mean of their kind; what the package does is "means of vectors" with the Blend at
strength 1, without the unit length after it, and `benchmarks.mixed` measures that. Intervals are bootstraps over
the items, paired with Blend.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.environment import environment, one_thread, save, table
from benchmarks.mixed_galleries import MIXED, OWN, Floats, Mixed
from benchmarks.reference import unit
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import NNN, Blend, Estimator
from milvus_hubness.quality.measures import confidence_interval, paired_difference
from milvus_hubness.quality.outcomes import assess
from milvus_hubness.quality.right_items import RightItems


def centred(mixed: Mixed) -> Mixed:
    """Return all vectors less the mean of their kind, at unit length (GR-CLIP, arXiv 2507.19054). The mean of the
    queries' kind is that of the bank."""
    gallery = mixed.gallery.copy()
    centre = mixed.bank.mean(0)
    own = mixed.kinds == OWN
    gallery[own] -= centre
    gallery[~own] -= gallery[~own].mean(0)
    return mixed._replace(
        query=unit(mixed.query - centre), bank=unit(mixed.bank - centre), gallery=unit(gallery)
    )


def standardised(mixed: Mixed, statistics: Callable[[Floats], tuple[float, float]]) -> Mixed:
    """Return vectors whose inner products are (s − μ) / σ, the statistics of the scores of the bank by kind."""
    columns = np.empty((len(mixed.gallery), 2), np.float32)
    for kind in (mixed.kinds == OWN, mixed.kinds != OWN):
        columns[kind] = statistics(mixed.bank @ mixed.gallery[kind].T)
    mean, spread = columns.T[:, :, None]
    return mixed._replace(
        query=_with_ones(mixed.query),
        bank=_with_ones(mixed.bank),
        gallery=np.hstack([mixed.gallery, -mean]) / spread,
    )


def _with_ones(rows: Floats) -> Floats:
    return np.hstack([rows, np.ones((len(rows), 1), np.float32)])


def of_nearest(scores: Floats) -> tuple[float, float]:
    """Return mean and deviation of the best score of each bank query (pseudo-positives, arXiv 2511.22141)."""
    best = scores.max(1)
    return float(best.mean()), float(best.std())


def of_all(scores: Floats) -> tuple[float, float]:
    return float(scores.mean()), float(scores.std())


def mean_of_all(scores: Floats) -> tuple[float, float]:
    return float(scores.mean()), 1.0


FORMS: dict[str, Callable[[Mixed], Mixed]] = {
    "": lambda mixed: mixed,
    "means of scores": lambda mixed: standardised(mixed, mean_of_all),
    "means of vectors": centred,
    "standardised by all scores": lambda mixed: standardised(mixed, of_all),
    "standardised by the nearest": lambda mixed: standardised(mixed, of_nearest),
}
ESTIMATORS: dict[str, Estimator | None] = {
    "raw": None,
    "NNN 16, .75": NNN(16, 0.75),
    "Blend": Blend(),
    "Blend at strength 1": Blend(strength=1.0),
}


def run(name: str) -> dict[str, dict[str, Any]]:
    """{method: its cell}. R@1 is the mean of that where the right item is of the queries' kind and where not."""
    totals: dict[str, Floats] = {}  # (2, n_items): by kind
    shares: dict[str, list[float]] = {}
    draws = list(MIXED[name]())
    asked = np.zeros((2, len(draws[0].gallery)))
    for mixed in draws:
        own, positives = mixed.kinds == OWN, mixed.things
        kind = own[positives].astype(int)
        np.add.at(asked, (kind, positives), 1)
        for form, change in FORMS.items():
            changed = change(mixed)
            biases = [
                np.zeros(len(changed.gallery), np.float32)
                if estimator is None
                else estimator.fit(QueryBank(changed.bank), gallery=changed.gallery).bias(
                    changed.gallery
                )
                for estimator in ESTIMATORS.values()
            ]
            outcome = assess(
                changed.query, changed.gallery, biases, RightItems.of(changed.positives)
            )
            for method, right, retrieved in zip(
                ESTIMATORS, outcome.values, outcome.retrieved, strict=True
            ):
                full = ", ".join(filter(None, (method, form)))
                np.add.at(
                    totals.setdefault(full, np.zeros_like(asked)),
                    (kind, positives),
                    100 * right,
                )
                shares.setdefault(full, []).append(100 * float(own[retrieved[:, 0]].mean()))
    by_kind = {method: total / asked for method, total in totals.items()}
    blend = by_kind["Blend"].mean(0)
    cells = {}
    for method, values in by_kind.items():
        other, own = (confidence_interval(of_kind, resamples=1000)._asdict() for of_kind in values)
        over = paired_difference(blend, values.mean(0), resamples=1000)._asdict()
        share = float(np.mean(shares[method]))
        cells[method] = {"own": own, "other": other, "over_blend": over, "first_of_own_kind": share}
    print(
        name,
        {method: f"{cell['over_blend']['estimate']:+.2f}" for method, cell in cells.items()},
        flush=True,
    )
    return cells


def markdown(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    rows = []
    for method in next(iter(results.values())):
        shown = []
        for cells in results.values():
            cell = cells[method]
            over = cell["over_blend"]
            gain = (
                f"; {over['estimate']:+.1f} ({over['low']:+.1f} … {over['high']:+.1f})"
                if method != "Blend"
                else ""
            )
            kinds = " / ".join(f"{cell[kind]['estimate']:.1f}" for kind in ("own", "other"))
            shown.append(f"{kinds}{gain}; {cell['first_of_own_kind']:.0f}%")
        rows.append([method, *shown])
    return (
        "R@1 (%) where the right item is of the queries' own kind / of the other kind; the mean of both less that of "
        "Blend, with its 95% interval; the share of first answers of the queries' own kind, as half of the right ones "
        "are.\n\n" + table(["method", *results], rows)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "galleries", nargs="*", metavar="gallery", help=f"of {', '.join(MIXED)}; all unless given"
    )
    names = parser.parse_args().galleries or list(MIXED)
    one_thread()
    started = time.monotonic()
    results = {name: run(name) for name in names}
    text = markdown(results)
    print(text)
    if names == list(MIXED):
        save("mixed_forms", {"environment": environment(started), "tasks": results}, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
