"""How finely the augmented form tells the nearest rows apart, and what a plan says of it."""

import numpy as np
import pytest

from milvus_hubness.correction.codec.arrays import rounded
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.errors import CannotMigrate
from milvus_hubness.jobs.migration.estimates import resolution


def drawn(dim=64):
    rng = np.random.default_rng(3)
    return (rng.standard_normal((count, dim)).astype(np.float32) for count in (1_000, 200))


@pytest.mark.parametrize("metric", ["IP", "COSINE", "L2"])
def test_float32_keeps_every_order(metric):
    rows, queries = drawn()
    found = resolution(Layout(64, metric), rows, queries, "float32")
    assert found.in_order == 1
    assert found.error < found.gap / 1_000
    assert (found.rows, found.queries, found.remark("float32")) == (1_000, 200, [])


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("float16", 0.93, 0.99), ("bfloat16", 0.7, 0.9)]
)
def test_unit_vectors_that_are_rounded_once_more_lose_some_orders_and_the_plan_says_so(
    dtype, least, most
):
    rows, queries = drawn()
    found = resolution(Layout(64, "COSINE"), rounded(rows, dtype), queries, dtype)
    assert least < found.in_order < most
    [remark] = found.remark(dtype)
    assert f"{found.in_order:.0%} of 200 queries keep the order" in remark
    assert dtype in remark
    assert resolution(Layout(64, "IP"), rounded(rows, dtype), queries, dtype).in_order == 1


def test_groups_far_apart_are_refused_under_l2_alone():
    rows, queries = drawn()
    rows[::2] += 1_000
    rows[1::2] -= 1_000
    queries += 1_000
    found = resolution(Layout(64, "L2"), rows, queries, "float32")
    with pytest.raises(CannotMigrate, match="keep each group in a collection of its own"):
        found.require("vector")
    resolution(Layout(64, "L2"), rows[::2], queries, "float32").require("vector")


def test_rows_that_are_alike_are_no_lost_order():
    rows, queries = drawn()
    rows[500:] = rows[:500]
    assert resolution(Layout(64, "L2"), rows, queries, "float32").in_order == 1


@pytest.mark.parametrize("rows", [np.zeros((0, 4)), np.full((20, 4), np.nan), np.ones((11, 4))])
def test_too_few_rows_tell_nothing(rows):
    assert (
        resolution(Layout(4, "L2"), rows.astype(np.float32), np.ones((3, 4), np.float32), "float32")
        is None
    )
