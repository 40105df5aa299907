"""Diagnoses of arrays, as tests have them."""

from __future__ import annotations

import numpy as np

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.jobs.common.gallery import Gallery
from milvus_hubness.jobs.common.judgements import Judgements
from milvus_hubness.reports import report
from milvus_hubness.reports.biased import Biased
from milvus_hubness.reports.report import BankFacts, Detail


def biased(
    gallery, biases, *, bank, keys=None, fields=None, title="Gallery", strength=1.0, activated=None, kinds=None
):  # fmt: skip
    """Return items (n, d) under IP with their biases (n,)."""
    vectors = np.asarray(gallery, np.float32)
    rows = Gallery(
        title,
        Layout(vectors.shape[1], "IP"),
        list(range(len(vectors)) if keys is None else keys),
        vectors,
        [{} for _ in vectors] if fields is None else fields,
        None,
    )
    biases = np.asarray(biases, np.float32)
    return Biased(rows, biases, strength, QueryBank.of(bank), activated, kinds)


def judgements(queries, positives, keys, grades=None, texts=None):
    """Return queries (n, d) with the keys of their right items, each query as it is."""
    right = [
        list(items) if isinstance(items, set) else np.atleast_1d(items).tolist()
        for items in positives
    ]
    if grades is None:
        grades = [[1.0] * len(items) for items in right]
    graded = [tuple(map(float, np.atleast_1d(of_query))) for of_query in grades]
    named = [tuple(keys[item] for item in items) for items in right]
    return Judgements(QueryBank(queries), named, graded, clicks=graded, texts=texts)


def diagnose(
    queries, gallery, biases, *, bank=None, positives=None, grades=None, query_texts=None, query_groups=None,
    verdict=None, figures=None, slice_by=None, group_by=None, runs=None, measure="R@1", **options,
):  # fmt: skip
    """Return the diagnosis of items (n, d) with biases (n,), by queries (m, d) or, with positives,
    judgements. bank: by default the queries.
    """
    of_report = {name: options.pop(name) for name in ("k", "strengths") if name in options}
    items = biased(gallery, biases, bank=queries if bank is None else bank, **options)
    searched = QueryBank(queries, groups=query_groups)
    if positives is not None:
        searched = judgements(queries, positives, items.gallery.keys, grades, query_texts)
    return report.diagnose(
        items,
        searched,
        measure=measure,
        known=BankFacts(verdict, figures),
        detail=Detail(query_texts, slice_by, group_by, runs),
        **of_report,
    )
