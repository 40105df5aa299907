"""Diagnoses of arrays, as tests have them."""

from __future__ import annotations

from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.reports import report


def diagnose(queries, gallery, bias, *, positives=None, grades=None, measure="R@1", **options):
    """Return the diagnosis of items (n, d) with biases (n,), by queries (m, d) or, with positives,
    labelled ones.
    """
    if positives is not None:
        queries = LabelledQueries.of(queries, positives, grades, measure=measure)
    return report.diagnose(queries, gallery, bias, **options)
