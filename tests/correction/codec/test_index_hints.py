"""Locality hint columns: no score knows of them, and an index finds more by them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milvus_hubness import NNN, QueryBank
from milvus_hubness.correction.codec.index_hints import (
    COLUMNS,
    FEWEST_QUERIES,
    LANDMARKS,
    NEAR,
    REACH,
    hint_directions,
    measured_on,
)
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import BiasSlots, LocalityHints
from milvus_hubness.correction.estimators import Blend, RelativeNNN, Sinkhorn
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.correction.kernels.ann import AnnIndex, IndexSpec
from milvus_hubness.errors import DimensionMismatch, InvalidParameter
from tests.support.galleries import decoded
from tests.support.real_data import load_task, needs_real_data

DIM = 20


def sets(seed=0, items=50, queries=200, dim=DIM):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(n, dim)).astype(np.float32) for n in (items, queries))


def fitted(metric="COSINE", factor=1.0, graph_hint=True, dim=DIM, queries=200, slots=1):
    items, bank = sets(dim=dim, queries=queries)
    items *= np.float32(factor)
    layout = measured_on(
        Layout(dim, metric, BiasSlots(slots)),
        items,
        bank,
        graph_hint=graph_hint,
        locality_hints=True,
    )
    return Correction.fit(layout, NNN(4), QueryBank(bank)), items, bank


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("metric", ["IP", "COSINE"])
@pytest.mark.parametrize("queries", [200, LANDMARKS + 777])
def test_they_hold_where_the_nearest_queries_lie_along_the_main_axes_of_the_bank(metric, queries):
    correction, items, bank = fitted(metric, 3.0, queries=queries)
    some = unit(
        bank[np.linspace(0, queries - 1, min(queries, LANDMARKS)).astype(int)].astype(float)
    )
    _, directions = np.linalg.eigh(np.cov(some.T))
    found = correction.locality_hints(items)
    assert found.shape == (len(items), correction.layout.locality_hint_count)
    near = np.argsort(-(items.astype(float) @ some.T), axis=1)[:, :NEAR]
    means = some[near].mean(axis=1) - some.mean(axis=0)
    length = 1.0 if metric == "COSINE" else np.median(np.linalg.norm(items, axis=1))
    wanted = REACH * length * unit(means @ directions[:, -found.shape[1] :])
    # The axes are kept in a byte for each number.
    signs = np.sign((found * wanted).sum(axis=0))
    np.testing.assert_allclose(found, signs * wanted, atol=0.03 * length)


class Multiplied(np.ndarray):
    """A matrix that counts its products."""

    products = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        Multiplied.products += ufunc is np.matmul
        return getattr(ufunc, method)(*(np.asarray(each) for each in inputs), **options)


@pytest.mark.parametrize("metric", ["IP", "COSINE"])
@pytest.mark.parametrize(
    "estimator",
    [NNN(4), Sinkhorn(0.1), Blend([RelativeNNN(3), Sinkhorn(0.2)], strength=0.7)],
    ids=repr,
)
@pytest.mark.parametrize("are_new", [True, False])
def test_one_product_of_new_rows_with_the_bank_gives_their_biases_and_hints(
    metric, estimator, are_new
):
    correction, items, bank = fitted(metric, queries=LANDMARKS + 777)
    correction = Correction.fit(correction.layout, estimator, bank, gallery=items)
    rows = np.concatenate([items, 3 * items[:9] + 1, np.full((1, DIM), np.nan, np.float32)])
    wanted = replace(correction, are_new=are_new).centred(rows), correction.locality_hints(rows)
    counted = correction.fitted.bank.vectors.view(Multiplied)
    object.__setattr__(correction.fitted.bank, "vectors", counted)
    before = Multiplied.products
    biases, hints = correction.of_rows(rows, are_new=are_new)
    assert Multiplied.products == before + 1
    np.testing.assert_allclose(biases, wanted[0], atol=1e-5)
    np.testing.assert_allclose(hints, wanted[1], atol=1e-5)


def test_rows_without_a_bias_have_nothing_there():
    correction, items, _ = fitted()
    items[3], items[7, 2] = 0, np.nan
    found = correction.locality_hints(items)
    assert not found[[3, 7]].any()
    layout = correction.layout
    stored = layout.augment(items, np.zeros(len(items)), found)
    np.testing.assert_array_equal(stored[:, layout.locality_hint_columns], found)
    others = np.delete(found, [3, 7], axis=0)
    assert others.any(axis=1).all()
    unhinted = layout.augment(items, np.zeros(len(items)))
    assert not unhinted[:, layout.locality_hint_columns].any()
    without = Layout(DIM, "COSINE")
    assert Correction.fit(without, NNN(4), correction.fitted.bank).locality_hints(items).shape == (
        len(items),
        0,
    )


@given(st.sampled_from(["IP", "COSINE"]), st.booleans(), st.integers(0, 2**31), st.floats(-2, 2))
def test_no_score_no_bias_and_no_vector_knows_of_them(metric, graph_hint, seed, strength):
    correction, items, _ = fitted(metric, graph_hint=graph_hint, slots=2)
    layout, rng = correction.layout, np.random.default_rng(seed)
    biases, locality_hints = (
        rng.normal(size=(len(items), 2)),
        rng.normal(size=(len(items), layout.locality_hint_count)),
    )
    queries = rng.normal(size=(3, DIM)).astype(np.float32)
    bare, stored = layout.augment(items, biases), layout.augment(items, biases, locality_hints)
    for asked in (
        layout.encode_queries(queries, strength),
        layout.encode_queries(queries, 0.0, slot=1),
    ):
        np.testing.assert_array_equal(asked.astype(float) @ stored.T, asked.astype(float) @ bare.T)
    norms = layout.norms(items)
    np.testing.assert_array_equal(decoded(layout, stored, norms), decoded(layout, bare, norms))
    np.testing.assert_array_equal(layout.biases(stored, 1), biases[:, 1].astype(np.float32))
    np.testing.assert_array_equal(layout.with_biases(bare, {}, locality_hints), stored)
    again = layout.with_biases(layout.with_biases(stored, {0: biases[:, 1]}), {0: biases[:, 0]})
    np.testing.assert_array_equal(again, stored)
    assert (stored != bare).sum(axis=1).min() == layout.locality_hint_count
    with pytest.raises(DimensionMismatch, match=f"{layout.locality_hint_count} dimensions, got 1"):
        layout.augment(items, biases, locality_hints[:, :1])


def test_they_take_what_the_width_has_to_spare():
    def count(dim, metric="COSINE", queries=FEWEST_QUERIES, slots=1):
        items, bank = sets(dim=dim, queries=queries)
        return measured_on(
            Layout(dim, metric, BiasSlots(slots)), items, bank, locality_hints=True
        ).locality_hint_count

    assert count(32) == COLUMNS
    assert count(DIM) == 10
    assert count(32, slots=6) == 9
    assert count(39) == count(6) == 0
    assert (count(1_536), count(1_920), count(2_048)) == (10, 8, 0)
    assert 2 * len(hint_directions(next(sets(items=40, dim=1_920)), 8)) < 45_000, (
        "a record holds as much"
    )
    assert count(32, "L2") == 0
    assert count(32, queries=FEWEST_QUERIES - 1) == 0
    items, bank = sets()
    assert measured_on(Layout(DIM, "IP"), items, locality_hints=True).locality_hint_count == 0
    assert (
        measured_on(
            Layout(DIM, "IP"), items, bank, graph_hint=False, locality_hints=True
        ).locality_hint_count
        == 11
    )


def test_what_is_no_layout_is_refused():
    directions = hint_directions(next(sets(items=40)), 9)
    for arguments, match in [
        ((directions, 0.0), "a length above 0, got 0"),
        (("", 0.5), "need directions"),
        ((directions, float("nan")), "got nan"),
    ]:
        with pytest.raises(InvalidParameter, match=match):
            LocalityHints(*arguments)

    for options, match in [
        ({"metric": "L2"}, "not for L2"),
        ({"slots": BiasSlots(6)}, "has 6 columns to spare, not 9"),
        ({"dim": 19}, "180 numbers are no directions of dimension 19"),
        ({"locality_hints": LocalityHints("?", 0.5)}, "not base64"),
    ]:
        valid = {"dim": DIM, "metric": "COSINE", "locality_hints": LocalityHints(directions, 0.5)}
        with pytest.raises(InvalidParameter, match=match):
            Layout(**{**valid, **options})


@pytest.mark.parametrize("metric", ["IP", "COSINE"])
def test_vectors_without_structure_get_none(metric):
    rng = np.random.default_rng(0)
    items, bank = (rng.standard_normal((rows, 512), np.float32) for rows in (3_000, 500))
    topics = rng.standard_normal((40, 512), np.float32)
    drawn = measured_on(Layout(512, metric), items, bank, locality_hints=True)
    alike = (topics[rng.integers(0, 40, len(rows))] + 0.7 * rows for rows in (items, bank))
    assert not drawn.locality_hint_count
    assert (
        measured_on(Layout(512, metric), *alike, locality_hints=True).locality_hint_count == COLUMNS
    )


def recalls_without_and_with_them(items, bank, queries, index_type, params, width):
    """recall@10 of corrected searches."""
    for locality_hints in (False, True):
        layout = measured_on(
            Layout(items.shape[1], "COSINE"), items, bank, locality_hints=locality_hints
        )
        correction = Correction.fit(layout, NNN(32, 0.75), QueryBank(bank))
        biases = correction.centred(items)
        stored = layout.augment(items, biases - biases.mean(), correction.locality_hints(items))
        index = AnnIndex(stored, IndexSpec.of(index_type, params), metric="IP")
        exact = np.argsort(-(queries @ items.T - biases), axis=1)[:, :10]
        found = index.search(layout.encode_queries(queries), 10, width)
        yield np.mean([np.isin(own, got).mean() for own, got in zip(exact, found, strict=True)])


@needs_real_data
def test_an_index_of_cells_finds_more_of_what_corrected_searches_look_for_on_real_data():
    task = load_task("caption_translation")
    sides = task.gallery[:10_000], task.bank, task.query[:300]
    without, with_them = recalls_without_and_with_them(*sides, "IVF_FLAT", {"nlist": 100}, 8)
    assert with_them > without + 0.05


@pytest.mark.parametrize(
    ("index_type", "params", "width"),
    [("HNSW", {"M": 16, "efConstruction": 100}, 10), ("IVF_FLAT", {"nlist": 64}, 6)],
)
def test_it_finds_far_more_where_queries_ask_for_little_of_what_tells_items_apart(
    index_type, params, width
):
    rng = np.random.default_rng(0)
    items = rng.normal(size=(5_000, 64))
    asked = 0.1 * rng.normal(size=(2_300, 64))
    asked[:, :8] += rng.normal(size=(len(asked), 8))
    items, asked = unit(items).astype(np.float32), unit(asked).astype(np.float32)
    sides = items, asked[300:], asked[:300]
    without, with_them = recalls_without_and_with_them(*sides, index_type, params, width)
    assert with_them > without + 0.15
