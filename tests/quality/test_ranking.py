"""Ranks and exact search against sorting the whole matrix of scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milvus_hubness.correction.kernels.policy import kernel_policy
from milvus_hubness.errors import (
    DimensionMismatch,
    InvalidInput,
    InvalidParameter,
    NonFiniteVectors,
)
from milvus_hubness.quality.measures import nearest
from milvus_hubness.quality.retrieval import ranks
from milvus_hubness.quality.right_items import RightItems


def vectors(n, d=4, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


@st.composite
def searches(draw):
    n_queries, n_items = draw(st.integers(1, 12)), draw(st.integers(1, 25))
    item = st.integers(0, n_items - 1)
    positives = draw(
        st.lists(
            st.one_of(item, st.sets(item, min_size=1), st.lists(item, min_size=1)),
            min_size=n_queries,
            max_size=n_queries,
        )
    )
    return n_queries, n_items, positives, draw(st.integers(1, 100)), draw(st.booleans())


@given(searches(), st.integers(0, 1000), st.sampled_from(["numpy", "dense"]))
def test_ranks_are_places_in_the_sorted_row(search, seed, kernel):
    n_queries, n_items, positives, tile, corrected = search
    queries, gallery = vectors(n_queries, seed=seed), vectors(n_items, seed=seed + 1)
    bias = vectors(n_items, 1, seed + 2)[:, 0] if corrected else None
    with kernel_policy(kernel=kernel, tile_size=tile):
        found = ranks(queries, gallery, RightItems.of(positives), bias)
    order = np.argsort(-(queries @ gallery.T - (0 if bias is None else bias)), axis=1)
    for query, wanted in enumerate(positives):
        wanted = {wanted} if isinstance(wanted, int) else set(wanted)
        places = [place for place, item in enumerate(order[query].tolist(), 1) if item in wanted]
        assert (
            found.ranks[found.right.starts[query] : found.right.starts[query + 1]].tolist()
            == places
        )
        assert found.best[query] == places[0]


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 1000))
def test_nearest_is_the_sorted_row(n_queries, n_items, seed):
    queries, gallery, bias = (
        vectors(n_queries, seed=seed),
        vectors(n_items, seed=seed + 1),
        vectors(n_items, 1)[:, 0],
    )
    order = np.argsort(-(queries @ gallery.T - bias), axis=1)
    for k in {1, n_items}:
        np.testing.assert_array_equal(nearest(queries, gallery, k, bias), order[:, :k])


def test_equal_items_count_as_behind():
    """Twice the positive, computed in other places of a tile; a query without direction; both positive."""
    gallery = np.concatenate([vectors(30, 384), vectors(30, 384)])
    queries = np.concatenate([gallery[:3], np.zeros((1, 384), np.float32)])
    assert ranks(queries, gallery, RightItems.of([0, 31, 2, 7])).best.tolist() == [1, 1, 1, 1]
    both = ranks(queries[:1], gallery, RightItems.of([{0, 30, 5}]))
    assert both.ranks[:2].tolist() == [1, 2]
    assert both.ranks[2] > 2


def test_a_bias_beyond_the_scores_decides():
    gallery, bias = vectors(10), np.arange(10) * 100.0
    assert ranks(vectors(5), gallery, RightItems.of(np.arange(5)), bias).best.tolist() == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_positives_as_an_array_and_several_per_query():
    queries, gallery = vectors(6), vectors(9)
    one = ranks(queries, gallery, RightItems.of(np.arange(6, dtype=np.int32)))
    assert one.right.starts.tolist() == [0, 1, 2, 3, 4, 5, 6]
    several = ranks(
        queries, gallery, RightItems.of([np.array([0, 3]), (1,), {2}, frozenset([3, 4]), 4, [5, 5]])
    )
    assert np.diff(several.right.starts).tolist() == [2, 1, 1, 2, 1, 1]


@pytest.mark.parametrize(
    ("positives", "complaint"),
    [
        ([0, 1], "positives cover 2 queries, but 3"),
        ([0, 9, 1], "positives of query 1 are not among the 9 gallery items"),
        ([{0, 12}, -1, 1], "positives of query 0, 1 are not"),
        ([0, [], 1], "no positive for query 1"),
        ([0, "a", 1], "must be the numbers of gallery items"),
        ([0, 1.5, 1], "must be the numbers of gallery items"),
    ],
)
def test_positives_that_point_nowhere(positives, complaint):
    with pytest.raises(InvalidInput, match=complaint):
        ranks(vectors(3), vectors(9), RightItems.of(positives))


def test_bad_vectors():
    queries, gallery = vectors(3), vectors(9)
    for call in (
        lambda *given: ranks(*given[:2], [0, 1, 2], *given[2:]),
        lambda *given: nearest(*given[:2], 1, *given[2:]),
    ):
        with pytest.raises(
            DimensionMismatch, match="the queries have dimension 4, the gallery has 3"
        ):
            call(queries, gallery[:, :3])
        with pytest.raises(NonFiniteVectors, match="the gallery"):
            call(queries, gallery * np.inf)
        with pytest.raises(DimensionMismatch, match=r"biases must have shape \(9,\)"):
            call(queries, gallery, np.zeros(3))
        with pytest.raises(NonFiniteVectors, match="the biases"):
            call(queries, gallery, np.full(9, np.nan))
        with pytest.raises(InvalidInput, match="2-D"):
            call(queries[0], gallery)
    with pytest.raises(InvalidInput, match="queries or gallery items are missing"):
        ranks(queries[:0], gallery, RightItems.of([]))
    with pytest.raises(InvalidParameter, match=r"k is 10 and the gallery has 9 items"):
        nearest(queries, gallery, 10)
    with pytest.raises(InvalidParameter, match="k must be"):
        nearest(queries, gallery, 0)
