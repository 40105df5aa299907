"""Faults of the data that look like hubness: each is named on data that have it, and on no clean ones."""

import numpy as np
import pytest

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.quality.data_faults import data_faults
from milvus_hubness.quality.labelled import LabelledQueries
from tests.support.galleries import hubby_gallery
from tests.support.real_data import EMBEDDING_TASKS, load_task, needs_real_data

ITEMS, QUERIES, ANSWERS = hubby_gallery()
BANK = QueryBank(QUERIES[:400])
ASKED, RIGHT = QUERIES[400:], [np.array([answer]) for answer in ANSWERS[400:]]


def faults(items=ITEMS, bank=BANK, metric="COSINE", **more):
    return {fault.name: fault for fault in data_faults(items, bank, metric, **more)}


@pytest.mark.parametrize("metric", ["COSINE", "IP", "L2"])
def test_clean_data_have_none(metric):
    unit = ITEMS / np.linalg.norm(ITEMS, axis=1, keepdims=True)
    assert faults(unit, metric=metric) == {}
    asked = ASKED / np.linalg.norm(ASKED, axis=1, keepdims=True)
    assert faults(unit, metric=metric, queries=LabelledQueries.of(asked, RIGHT)) == {}


@needs_real_data
@pytest.mark.parametrize("name", EMBEDDING_TASKS)
def test_there_are_no_grave_ones_in_real_data(name):
    task = load_task(name)
    metric = "IP" if name.startswith("text_video") else "COSINE"
    positives = [np.atleast_1d(right) for right in task.positives]
    labelled = LabelledQueries.of(task.query, positives)
    found = data_faults(task.gallery, QueryBank(task.bank), metric, queries=labelled)
    assert [fault for fault in found if fault.is_grave] == []


@pytest.mark.parametrize(("count", "is_grave"), [(3, False), (60, True)])
def test_zero_vectors_in_the_rows_and_left_out_of_them(count, is_grave):
    items = ITEMS.copy()
    items[:count] = 0
    fault = faults(items, metric="IP")["zero vectors"]
    assert fault.text == f"{count} of 400 rows have a zero vector"
    assert fault.is_grave == is_grave
    # Under COSINE no search has them, so they are not among the items.
    assert faults(unusable=count)["zero vectors"].text.startswith(
        f"{count} of {400 + count:,} rows"
    )


def test_constant_vectors_and_copies():
    items = ITEMS.copy()
    items[:17] = 0.5
    found = faults(items)
    assert found["constant vectors"].text == "17 of 400 rows have a vector of equal numbers"
    assert "duplicates" not in found, "they have a line of their own"
    items = ITEMS.copy()
    items[5:17] = items[5]
    assert faults(items)["duplicates"].text == (
        "11 of 400 rows have the vector of another row; one vector is there 12 times"
    )
    assert "duplicates" not in faults(np.vstack([ITEMS, ITEMS[:2]])), "as any collection has them"


def test_items_as_queries():
    """Also at another length, and as half precision has left them."""
    bank = QueryBank((3 * ITEMS[:200]).astype(np.float16).astype(np.float32))
    fault = faults(bank=bank)["items as queries"]
    assert fault.text == "200 of the 200 vectors of the bank are those of items"
    assert fault.is_grave
    assert "swapped" in fault.remedy
    some = faults(bank=QueryBank(np.vstack([QUERIES[:180], ITEMS[:20]])))["items as queries"]
    assert not some.is_grave
    assert "items as queries" not in faults(bank=QueryBank(np.vstack([QUERIES, ITEMS[:2]])))


def test_zero_queries():
    queries = QUERIES[:40].copy()
    queries[:2] = 0
    fault = faults(bank=QueryBank(queries))["zero queries"]
    assert fault.text == "2 of the 40 queries of the bank are zero vectors"


def test_a_metric_that_finds_less_than_another():
    """By IP the longest vectors answer: with right items the gain of another metric shows it."""
    lengths = np.random.default_rng(0).lognormal(0, 1, len(ITEMS)).astype(np.float32)
    items = ITEMS * lengths[:, None]
    fault = faults(items, metric="IP", queries=LabelledQueries.of(ASKED, RIGHT))["metric"]
    assert "by IP and" in fault.text
    assert fault.text.endswith("by COSINE")
    alone = faults(items, metric="IP")["metric"]
    assert "the first answers are the longest vectors" in alone.text
    assert "metric" not in faults(items, metric="COSINE", queries=LabelledQueries.of(ASKED, RIGHT))


def test_right_items_that_are_found_by_chance():
    others = np.random.default_rng(1).permutation(RIGHT)
    fault = faults(queries=LabelledQueries.of(ASKED, list(others)))["right rows by chance"]
    assert fault.is_grave
    assert "are the keys those of the right rows" in fault.remedy
