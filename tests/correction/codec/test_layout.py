"""The augmented form: what the database computes on it is the corrected score, and nothing is lost."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from milvus_hubness.correction.codec.arrays import lost, rounded
from milvus_hubness.correction.codec.index_hints import (
    GRAPH_HINT_SHARE,
    LENGTH_SHARE,
    SMALL_BIASES,
    measured_on,
)
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import BiasSlots, GraphHint, HalfSquares
from milvus_hubness.correction.codec.quantisation import with_spread
from milvus_hubness.correction.kernels.ann import AnnIndex, IndexSpec
from milvus_hubness.errors import (
    DimensionMismatch,
    InvalidInput,
    InvalidParameter,
    NonFiniteVectors,
    ZeroVectors,
)
from tests.support.galleries import decoded, nnn

METRICS = ["IP", "COSINE", "L2"]
SMALLEST = 2.0**-149
"""The smallest number above 0 in float32."""
FLOATS = st.floats(-8, 8, width=32, allow_subnormal=False)

ONE_ROW_OF_ZEROS = (
    np.zeros((1, 1), np.float32),
    np.zeros((1, 1), np.float32),
    np.zeros(1, np.float32),
)


@st.composite
def cases(draw, metric=None):
    """bias_scale: as `with_bias_scale` and `measured_on` choose one, for spread layouts and for IP only. Relative to
    the smallest scale of L2, which unspread layouts have, any other is refused."""
    dim = draw(st.integers(1, 40))
    metric = metric or draw(st.sampled_from(METRICS))
    spread = draw(st.sampled_from([1, 1, 2, 8]))
    scales = [1.0, 0.25, 64.0] if spread > 1 or metric == "IP" else [1.0]
    layout = Layout(
        dim,
        metric,
        BiasSlots(draw(st.integers(1, 5)), scale=draw(st.sampled_from(scales)), spread=spread),
    )
    items = draw(hnp.arrays(np.float32, (draw(st.integers(1, 6)), dim), elements=FLOATS))
    queries = draw(hnp.arrays(np.float32, (draw(st.integers(1, 4)), dim), elements=FLOATS))
    biases = draw(hnp.arrays(np.float32, len(items), elements=st.floats(-2, 2, width=32)))
    if layout.metric == "L2":
        away = np.float32(draw(st.sampled_from([0, 0, 20, -100, 1_000])))
        items, queries = items + away, queries + away
    if layout.metric == "COSINE":
        assume((np.linalg.norm(items, axis=1) > 1e-3).all())
        assume((np.linalg.norm(queries, axis=1) > 1e-3).all())
    if draw(st.booleans()):
        layout = measured_on(layout, items)
    return layout, items, queries, biases


def similarity(layout, queries, items):
    """The similarity that the biases belong to, in float64: q·r, cosine, −½‖q−r‖²."""
    q, r = queries.astype(float), items.astype(float)
    if layout.metric == "IP":
        return q @ r.T
    if layout.metric == "COSINE":
        return (q @ r.T) / np.outer(np.linalg.norm(q, axis=1), np.linalg.norm(r, axis=1))
    return -0.5 * ((q[:, None] - r[None]) ** 2).sum(-1)


def tolerance(*arrays):
    return 3e-6 * (1 + max(float((np.asarray(a, float) ** 2).sum(-1).max()) for a in arrays))


@given(cases(), st.floats(-2, 2))
def test_the_inner_product_of_stored_and_asked_is_the_corrected_score(case, strength):
    layout, items, queries, biases = case
    products = (
        layout.encode_queries(queries, strength).astype(float)
        @ layout.augment(items, biases).astype(float).T
    )
    corrected = similarity(layout, queries, items) - strength * biases.astype(float)
    scores = layout.scores(products, queries, strength)
    bound = tolerance(items, queries)
    if layout.metric == "L2":
        distances = ((queries[:, None].astype(float) - items[None]) ** 2).sum(-1)
        np.testing.assert_allclose(scores, distances + 2 * strength * biases, atol=2 * bound)
    else:
        np.testing.assert_allclose(scores, corrected, atol=bound)


@given(cases())
def test_strength_zero_gives_the_raw_order(case):
    layout, items, queries, biases = case
    products = (
        layout.encode_queries(queries, 0.0).astype(float)
        @ layout.augment(items, biases).astype(float).T
    )
    raw = similarity(layout, queries, items)
    for row, order in zip(raw, np.argsort(-products, axis=1, kind="stable"), strict=True):
        assert (np.diff(row[order]) <= 2 * tolerance(items, queries)).all()


@given(cases())
def test_strip_returns_what_went_in(case):
    layout, items, _, biases = case
    revert = decoded(layout, layout.augment(items, biases), layout.norms(items))
    if layout.metric == "COSINE":
        np.testing.assert_allclose(revert, items, rtol=2.4e-7, atol=1e-30)
    else:
        np.testing.assert_array_equal(revert, items)


@given(cases("COSINE"))
def test_unit_vectors_come_back_bit_for_bit(case):
    layout, items, _, biases = case
    unit = (items / np.linalg.norm(items.astype(float), axis=1)[:, None]).astype(np.float32)
    np.testing.assert_array_equal(
        decoded(layout, layout.augment(unit, biases), layout.norms(unit)), unit
    )


@given(cases())
def test_reduced_vectors_give_the_similarity_that_biases_are_estimated_on(case):
    layout, items, queries, _ = case
    products = (
        layout.reduce_queries(queries).astype(float) @ layout.reduce_items(items).astype(float).T
    )
    np.testing.assert_allclose(
        products, similarity(layout, queries, items), atol=2 * tolerance(items, queries)
    )


@given(cases(), st.data())
def test_each_slot_answers_alone(case, data):
    layout, items, queries, _ = case
    slot = data.draw(st.integers(0, layout.slots.count - 1))
    table = np.arange(len(items) * layout.slots.count, dtype=np.float32).reshape(
        len(items), layout.slots.count
    )
    stored = layout.augment(items, table)
    np.testing.assert_array_equal(layout.biases(stored, slot), table[:, slot])
    raw = layout.encode_queries(queries, 0.0, slot=slot).astype(float) @ stored.astype(float).T
    corrected = (
        layout.encode_queries(queries, 1.0, slot=slot).astype(float) @ stored.astype(float).T
    )
    expected = np.broadcast_to(table[:, slot], raw.shape)
    np.testing.assert_allclose(raw - corrected, expected, atol=tolerance(items, queries))


@given(cases(), st.floats(-3, 3))
def test_products_undoes_scores(case, score):
    layout, _, queries, _ = case
    revert = layout.scores(layout.products([[score]], queries[0]), queries[:1])
    assert revert[0, 0] == pytest.approx(score, abs=tolerance(queries))


@given(cases("L2"))
def test_other_biases_replace_those_in_their_slot_alone_and_exactly(case):
    layout, items, _, biases = case
    stored = layout.augment(items, 0.5 * biases)
    changed = layout.with_biases(stored, {layout.slots.count - 1: biases})
    np.testing.assert_allclose(
        layout.biases(changed, layout.slots.count - 1), biases, rtol=0, atol=1e-37
    )
    slot = np.arange(layout.width)[layout.columns_of(layout.slots.count - 1)].tolist()
    others = np.delete(
        np.arange(layout.width), [*slot, layout.width - 1] if layout.graph_hint else slot
    )
    np.testing.assert_array_equal(changed[:, others], stored[:, others])


@given(cases())
@example((Layout(1, "L2"), np.float32([[2.0**-126]]), np.float32([[0.0]]), np.float32([0.5])))
def test_no_query_asks_the_link_column_and_the_graph_links_by_it(case):
    layout, items, queries, biases = case
    layout = measured_on(layout, items, queries)
    stored = layout.augment(items, biases)
    hint = layout.graph_hint
    if hint is None:
        return
    assert not layout.encode_queries(queries)[:, -1].any()
    graph_hint = stored[:, -1].astype(float)
    by_length = np.minimum(0.5 * hint.length_pull * (items.astype(float) ** 2).sum(1), hint.anchor)
    wanted = hint.anchor - hint.pull * biases.astype(float) - by_length
    np.testing.assert_allclose(graph_hint, wanted, rtol=3e-7, atol=1e-6 * (1 + hint.anchor))
    assert not stored[:, layout.dim + layout.numbers : -1].any()
    other = layout.with_biases(stored, {0: biases + 1})
    falls = hint.pull / layout.slots.count
    np.testing.assert_allclose(
        graph_hint - other[:, -1], falls, rtol=1e-3, atol=1e-6 * (1 + abs(graph_hint).max())
    )


def test_the_link_column_takes_what_the_width_has_to_spare():
    items = np.random.default_rng(0).normal(size=(50, 31)).astype(np.float32)
    assert measured_on(Layout(31, "IP"), items).graph_hint is None
    items = items[:, :30]
    assert measured_on(Layout(30, "IP"), items).graph_hint.anchor > 0
    assert measured_on(Layout(29, "L2"), items[:, :29]).graph_hint is None
    assert measured_on(Layout(30, "IP"), items, graph_hint=False) == Layout(30, "IP")
    with pytest.raises(InvalidParameter, match="has 0 columns to spare, not 1"):
        Layout(31, "IP", graph_hint=GraphHint(1.0))
    with pytest.raises(InvalidParameter, match="needs an anchor"):
        GraphHint(0.0, pull=0.5)


def test_the_pull_is_in_proportion_to_what_biases_are_of():
    items = np.random.default_rng(0).normal(size=(50, 20)).astype(np.float32)
    layout = Layout(20, "IP")
    near, far = (measured_on(layout, items, factor * items).graph_hint for factor in (1, 10))
    assert near.anchor == far.anchor
    assert far.pull == pytest.approx(near.pull / 10)
    assert near.anchor * near.pull == pytest.approx(GRAPH_HINT_SHARE["IP"], rel=1e-3)


def test_corrected_searches_of_a_graph_find_more_with_the_link():
    rng = np.random.default_rng(5)
    items, queries = rng.normal(size=(3_000, 24)), rng.normal(size=(100, 24))
    items *= np.exp(0.3 * rng.normal(size=3_000))[:, None]
    items, queries = items.astype(np.float32), queries.astype(np.float32)
    scores = similarity(Layout(24, "L2"), queries, items)
    biases = np.sort(similarity(Layout(24, "L2"), rng.normal(size=(200, 24)), items), axis=0)[
        -16:
    ].mean(0)
    biases -= biases.mean()
    exact = np.argsort(-(scores - biases), axis=1)[:, :10]
    spec, shares = IndexSpec.of("HNSW", {"M": 8, "efConstruction": 60}), []
    for graph_hint in (False, True):
        layout = measured_on(Layout(24, "L2"), items, queries, graph_hint=graph_hint)
        index = AnnIndex(layout.augment(items, biases), spec, metric="IP")
        found = index.search(layout.encode_queries(queries), 10, 20)
        shares.append(
            np.mean([np.isin(own, got).mean() for own, got in zip(exact, found, strict=True)])
        )
    assert shares[1] > shares[0] + 0.02


def of_varying_lengths(name, rows=2_500, asked=400):
    """(items, bank, queries) under IP, float32."""
    rng = np.random.default_rng(11)
    if name == "one shared direction":
        direction = rng.normal(size=32)
        items, queries = (
            rng.normal(size=(count, 32)) + np.outer(rng.gamma(1, 0.6, count), direction)
            for count in (rows, asked)
        )
    else:
        basis = rng.normal(size=(12, 64))
        items, queries = (
            unit(rng.normal(size=(count, 12)) @ basis + 0.1 * rng.normal(size=(count, 64)))
            for count in (rows, asked)
        )
        items *= np.exp(rng.normal(size=(rows, 1)))
    return (
        items.astype(np.float32),
        queries[:300].astype(np.float32),
        queries[300:].astype(np.float32),
    )


def unit(rows):
    return rows / np.linalg.norm(rows.astype(float), axis=1)[:, None]


def graph_recalls(items, bank, queries, layout):
    """recall@10 of HNSW at ef 64: of the vectors as they are, and in augmented form."""
    biases = nnn(bank, items, "IP", 16, 0.75)
    biases -= biases.mean()
    raw = similarity(Layout(items.shape[1], "IP"), queries, items)
    forms = [
        (items, queries, raw),
        (layout.augment(items, biases), layout.encode_queries(queries), raw - biases),
    ]
    for stored, sent, scores in forms:
        index = AnnIndex(
            stored, IndexSpec.of("HNSW", {"M": 16, "efConstruction": 100}), metric="IP"
        )
        exact = np.argsort(-scores, axis=1)[:, :10]
        found = index.search(sent, 10, 64)
        yield np.mean([np.isin(own, got).mean() for own, got in zip(exact, found, strict=True)])


@pytest.mark.parametrize("name", ["one shared direction", "low rank, log-normal lengths"])
def test_a_graph_finds_corrected_answers_among_items_of_varying_lengths_as_it_finds_plain_ones(
    name,
):
    items, bank, queries = of_varying_lengths(name)
    layout = measured_on(Layout(items.shape[1], "IP"), items, bank)
    plain, corrected = graph_recalls(items, bank, queries, layout)
    assert corrected > plain - 0.01


def test_a_graph_finds_as_much_for_queries_that_are_long():
    """Their biases are as much larger; what the queries rank is the same."""
    items, bank, queries = of_varying_lengths("one shared direction")
    items, bank, queries = (unit(rows).astype(np.float32) for rows in (items, bank, queries))
    shares = []
    for factor in (1, 32):
        layout = measured_on(Layout(32, "IP"), items, factor * bank)
        shares += list(graph_recalls(items, factor * bank, factor * queries, layout))[1:]
    assert shares[1] == pytest.approx(shares[0], abs=0.005)


def test_only_items_of_varying_lengths_under_ip_get_constants_for_them():
    items, bank, _ = of_varying_lengths("one shared direction", rows=200)
    bank = unit(bank).astype(np.float32)
    varied = measured_on(Layout(32, "IP"), items, bank)
    assert (varied.graph_hint.length_pull > 0, varied.slots.scale) == (True, SMALL_BIASES)
    assert varied.graph_hint.anchor * varied.graph_hint.length_pull == pytest.approx(LENGTH_SHARE)
    assert measured_on(Layout(32, "IP"), items, 8 * bank).slots.scale == SMALL_BIASES / 8
    one_length = unit(items).astype(np.float32)
    for metric, rows in [
        ("IP", one_length),
        ("IP", 3 * one_length),
        ("COSINE", items),
        ("L2", items),
    ]:
        layout = measured_on(Layout(32, metric), rows, bank)
        scale = layout.half_squares.scale if metric == "L2" else 1
        assert (layout.graph_hint.length_pull, layout.slots.scale) == (0, 1 / scale)
        assert measured_on(layout, rows, bank) == layout
    assert measured_on(Layout(32, "IP"), items, bank, graph_hint=False) == Layout(32, "IP")
    cells = measured_on(Layout(32, "IP"), items, bank, length_pull=False)
    assert (cells.graph_hint.length_pull, cells.slots.scale) == (0, 1)
    assert 8 * cells.graph_hint.anchor == varied.graph_hint.anchor


def test_a_later_measurement_forgets_the_lengths_of_an_earlier_one_but_no_scale_of_a_quantiser():
    items, bank, _ = of_varying_lengths("one shared direction", rows=200)
    one_length = unit(items).astype(np.float32)
    varied = measured_on(Layout(32, "IP"), items, bank)
    assert measured_on(varied, one_length, bank) == measured_on(Layout(32, "IP"), one_length, bank)
    assert measured_on(varied, items, bank) == varied
    assert (
        measured_on(Layout(32, "IP", BiasSlots(scale=2.0, spread=4)), items, bank).slots.scale
        == 2.0
    )


@pytest.mark.parametrize("factor", [0.0, 1e-6, 30.0, 1e4, 1e15])
def test_a_row_of_any_length_is_stored_found_and_read_back(factor):
    """Shorter or longer than all that the constants were measured on."""
    items, bank, queries = of_varying_lengths("one shared direction", rows=1_000)
    layout = measured_on(Layout(32, "IP"), items, bank)
    items[7] = factor * items[7]
    biases = nnn(bank, items, "IP", 16, 0.75).astype(np.float32)
    stored = layout.augment(items, biases)
    assert np.isfinite(stored).all()
    hint = layout.graph_hint
    assert abs(stored[7, -1] + hint.pull * biases[7]) <= hint.anchor * (1 + 1e-5)
    np.testing.assert_array_equal(decoded(layout, stored), items)
    scores = layout.encode_queries(queries).astype(float) @ stored.astype(float).T
    wanted = similarity(layout, queries, items) - biases.astype(float)
    np.testing.assert_allclose(scores, wanted, rtol=1e-6, atol=1e-5)
    index = AnnIndex(stored, IndexSpec.of("HNSW", {"M": 16, "efConstruction": 100}), metric="IP")
    exact = np.argsort(-wanted, axis=1)[:, :10]
    found = index.search(layout.encode_queries(queries), 10, 128)
    assert np.mean([np.isin(own, got).mean() for own, got in zip(exact, found, strict=True)]) > 0.97


@given(cases("IP"))
def test_new_biases_leave_the_hint_of_a_length_as_a_new_row_has_it(case):
    layout, items, _, biases = case
    layout = measured_on(layout, items)
    layout = replace(layout, slots=replace(layout.slots, scale=0.25))
    if layout.graph_hint:
        layout = replace(layout, graph_hint=replace(layout.graph_hint, length_pull=0.3))
    stored = layout.augment(items, biases)
    refreshed = layout.with_biases(stored, dict.fromkeys(range(layout.slots.count), biases + 1))
    np.testing.assert_array_equal(refreshed, layout.augment(items, biases + 1))


@pytest.mark.parametrize(
    ("anchor", "length_pull"),
    [(0.0, 0.1), (1.0, -0.1), (-1.0, 0.1), (1.0, math.nan), (1.0, math.inf)],
)
def test_lengths_without_an_anchor_are_refused(anchor, length_pull):
    with pytest.raises(InvalidParameter, match=r"anchor|finite number"):
        GraphHint(anchor, length_pull=length_pull)


@pytest.mark.parametrize("metric", ["COSINE", "L2"])
def test_lengths_count_under_ip_alone(metric):
    with pytest.raises(InvalidParameter, match="length_pull, with an anchor, is for IP, not for"):
        Layout(20, metric, graph_hint=GraphHint(1.0, length_pull=0.1))


def test_without_constants_the_half_square_is_stored_as_it_is():
    layout = Layout(2, "L2")
    stored, asked = layout.augment([[3.0, 4.0]], [0.3]), layout.encode_queries([[1.0, 2.0]], 0.7)
    np.testing.assert_array_equal(stored[0, :5], np.float32([3, 4, 12.5, (12.5 + 1) / 4, 0.3]))
    np.testing.assert_array_equal(asked[0, :5], np.float32([1, 2, 0, -4, -0.7]))


@pytest.mark.parametrize("metric", ["IP", "COSINE"])
def test_only_l2_has_an_offset_and_a_scale(metric):
    measured = measured_on(Layout(4, metric), np.random.default_rng(0).normal(size=(9, 4)))
    assert measured.half_squares is None
    with pytest.raises(InvalidParameter, match="for L2"):
        Layout(4, metric, half_squares=HalfSquares(scale=2.0))


@pytest.mark.parametrize(
    ("offset", "scale"), [(0.0, 3.0), (0.0, 0.0), (0.0, -2.0), (math.nan, 1.0)]
)
def test_constants_that_would_lose_biases_are_refused(offset, scale):
    with pytest.raises(
        InvalidParameter, match="finite number" if math.isnan(offset) else "power of two"
    ):
        Layout(4, "L2", half_squares=HalfSquares(offset=offset, scale=scale))


def test_stored_vectors_are_nearly_of_one_length_under_l2():
    rng = np.random.default_rng(3)
    items = (rng.normal(size=(500, 24)) * np.exp(0.3 * rng.normal(size=500))[:, None]).astype(
        np.float32
    )
    raw, stored = (
        np.linalg.norm(each, axis=1)
        for each in (items, measured_on(Layout(24, "L2"), items).augment(items, np.zeros(500)))
    )
    assert stored.std() / stored.mean() < 0.05 * raw.std() / raw.mean()


MEANS, SCALES = (0.0, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4), (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3)


def test_l2_is_safe_under_translation():
    asked = same = 0
    worst = 0.0
    for seed, (mean, scale) in enumerate(itertools.product(MEANS, SCALES)):
        rng = np.random.default_rng(seed)
        signs = np.where(rng.random(64) < 0.5, -mean, mean)
        items, queries = (
            (signs + scale * rng.normal(size=(n, 64))).astype(np.float32) for n in (1_000, 60)
        )
        layout = measured_on(Layout(64, "L2"), items, queries)
        products = layout.encode_queries(queries, 0.0) @ layout.augment(items, np.zeros(1_000)).T
        raw = -2 * similarity(layout, queries, items)
        best = np.argsort(-products, axis=1, kind="stable")[:, :10]
        found = np.take_along_axis(raw, best, 1)
        same += np.isclose(found, np.sort(raw, axis=1)[:, :10], rtol=1e-7, atol=0).all(axis=1).sum()
        asked += len(queries)
        distances = np.take_along_axis(layout.scores(products, queries, 0.0), best, 1)
        worst = max(worst, np.abs(distances / found - 1).max())
        np.testing.assert_array_equal(
            decoded(layout, layout.augment(items, np.zeros(1_000))), items
        )
    assert same >= 0.999 * asked
    assert worst < 1e-5


@pytest.mark.parametrize("mean", [10.0, 300.0, 1e4])
def test_biases_are_the_same_wherever_the_gallery_lies(mean):
    rng = np.random.default_rng(0)
    items, bank = rng.normal(size=(200, 24)), rng.normal(size=(50, 24))
    steps = 2.0**-9  # what float32 can hold at 10,000
    items, bank = (np.round(each / steps) * steps for each in (items, bank))
    found = []
    for away in (0.0, mean):
        layout = measured_on(Layout(24, "L2"), items + away)
        products = layout.reduce_queries(bank + away) @ layout.reduce_items(items + away).T
        found.append(np.sort(products, axis=0)[-8:].mean(axis=0))
    np.testing.assert_allclose(found[0], found[1], rtol=2e-6)


@given(
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.floats(-3e4, 3e4),
    st.floats(1e-3, 1e3),
    st.integers(0, 99),
    hnp.arrays(
        np.float32, (3, 20), elements=st.one_of(st.just(0.0), st.floats(-3e4, 3e4, width=32))
    ),
    hnp.arrays(np.float64, (3, 20), elements=st.floats(0.4, 2.1)),
)
def test_rows_are_read_back_bit_for_bit_or_named(dtype, mean, scale, seed, others, shares):
    sample = rounded(mean + scale * np.random.default_rng(seed).normal(size=(50, 20)), dtype)
    layout = measured_on(Layout(20, "L2"), sample)
    taken_off = layout.half_squares.mean_of(20).taken_off
    near = rounded(taken_off * shares, dtype)
    rows = np.concatenate([sample, rounded(others, dtype), near])
    is_lost = lost(rows, taken_off)
    assert not is_lost[: len(sample)].any()
    stored = layout.augment(rows, np.zeros(len(rows)))
    stored[:, :20] = rounded(stored[:, :20], dtype)
    revert = decoded(layout, stored, dtype=dtype)
    plain = np.where((rows == 0) & (taken_off != 0), np.float32(0), rows)
    np.testing.assert_array_equal(revert.view(np.uint32)[~is_lost], plain.view(np.uint32)[~is_lost])


def test_a_mean_is_kept_where_half_squares_need_it_alone():
    rng = np.random.default_rng(0)
    near, far = rng.normal(size=(500, 30)), rng.normal(size=(500, 30))
    far[:, 7] += 1_000
    far[:, 8] += 4
    assert measured_on(Layout(30, "L2"), near).half_squares.mean == ""
    assert measured_on(Layout(30, "IP"), far).half_squares is None
    layout = measured_on(Layout(30, "L2"), far)
    assert np.flatnonzero(layout.half_squares.mean_of(30).taken_off).tolist() == [7]
    linear = measured_on(Layout(30, "L2"), far, taken_off=False)
    assert linear.half_squares.mean
    assert not linear.half_squares.mean_of(30).taken_off.any()


def test_one_long_row_changes_little_of_the_constants():
    items = np.random.default_rng(4).normal(size=(500, 24)).astype(np.float32)
    layout = measured_on(Layout(24, "L2"), items)
    items[0] *= 1e4
    assert measured_on(Layout(24, "L2"), items).half_squares.scale == layout.half_squares.scale


def test_a_gallery_of_zeros_but_for_one_row_has_a_layout():
    items = np.zeros((1_000, 4))
    items[0] = 1
    for metric in ("IP", "L2"):
        layout = measured_on(Layout(4, metric), items)
        assert layout.half_squares == Layout(4, metric).half_squares


@pytest.mark.parametrize("items", [np.zeros((3, 4)), np.full((2, 4), np.nan), np.empty((0, 4))])
def test_rows_that_tell_nothing_leave_the_constants_alone(items):
    assert measured_on(Layout(4, "L2"), items) == Layout(4, "L2")


@pytest.mark.parametrize(
    ("dim", "metric", "slots", "width"),
    [
        (384, "IP", 2, 400),
        (512, "COSINE", 2, 528),
        (382, "IP", 2, 384),
        (382, "L2", 2, 400),
        (1, "L2", 16, 32),
    ],
)
def test_the_width_is_the_least_multiple_of_sixteen_with_room(dim, metric, slots, width):
    assert Layout(dim, metric, BiasSlots(slots)).width == width


@pytest.mark.parametrize(
    ("dim", "metric", "spread", "width"),
    [
        (384, "IP", 8, 400),
        (385, "IP", 8, 416),
        (384, "L2", 8, 416),
        (376, "L2", 8, 416),
        (128, "COSINE", 16, 160),
    ],
)
def test_a_spread_form_has_a_width_of_sixteens_too(dim, metric, spread, width):
    assert Layout(dim, metric, BiasSlots(2, spread=spread)).width == width


@pytest.mark.parametrize("metric", METRICS)
def test_a_bias_is_spread_over_columns_of_equal_weight(metric):
    layout = Layout(5, metric, BiasSlots(2, scale=16.0, spread=8))
    items = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    table = np.float32([[0.5, -0.25], [0.1, 0.2], [0.0, 3.0], [-1.5, 0.75]])
    stored, sent = layout.augment(items, table), layout.encode_queries(items, 0.5, slot=1)
    for slot in range(2):
        columns = layout.columns_of(slot)
        np.testing.assert_array_equal(
            stored[:, columns], np.repeat(16 * table[:, [slot]], 8, axis=1)
        )
    np.testing.assert_array_equal(
        sent[:, layout.columns_of(1)], np.full((4, 8), -0.5 / (16 * 8), np.float32)
    )
    assert not sent[:, layout.columns_of(0)].any()
    assert layout.numbers == (25 if metric == "L2" else 16)
    if metric == "L2":
        assert (stored[:, 6:14] == stored[:, [6]]).all(), "½‖r‖² is spread likewise"
        np.testing.assert_array_equal(sent[:, 6:14], np.full((4, 8), -4 / 8, np.float32))
        assert not stored[:, 5].any(), "no query reads the column u"


@given(cases(), st.floats(-2, 2))
@example((Layout(1, "IP", BiasSlots(spread=8)), *ONE_ROW_OF_ZEROS), 1.3132002446209012e-38)
@example(
    (Layout(1, "IP", BiasSlots(scale=0.25)), *ONE_ROW_OF_ZEROS[:2], np.float32([1.4e-45])), 1.0
)
def test_no_number_of_a_spread_form_is_rounded_differently(case, strength):
    """Scale and spread are powers of two, so that they move exponents and leave all digits alone. Numbers that become
    subnormal lose digits: no number in a column is off by more than the smallest one of float32."""
    layout, items, queries, biases = case
    plain = with_spread(layout, 1)
    slot = layout.slots.count - 1

    read = [form.biases(form.augment(items, biases), slot) for form in (layout, plain)]
    # In units of a bias, as stored in either form.
    smallest = SMALLEST * (1 / layout.slots.scale + 1 / plain.slots.scale)
    np.testing.assert_allclose(*read, rtol=0, atol=smallest)

    weights = [
        form.encode_queries(queries, strength, slot=slot)[:, form.columns_of(slot)]
        .astype(float)
        .sum(axis=1)
        * form.slots.scale
        / plain.slots.scale
        for form in (layout, plain)
    ]
    np.testing.assert_allclose(
        *weights,
        rtol=0,
        atol=SMALLEST * (layout.slots.spread * layout.slots.scale / plain.slots.scale + 1),
    )


@pytest.mark.parametrize(
    ("refused", "number"),
    [("spread", 3), ("spread", 0), ("spread", 128), ("spread", -2), ("scale", 3.0), ("scale", 0.0),
     ("scale", math.nan), ("scale", 2.0**101)],
)  # fmt: skip
def test_scales_and_spreads_that_would_round_are_refused(refused, number):
    """The message names the number that is refused."""
    with pytest.raises(InvalidParameter, match=f"^the {refused} of biases is a power of two"):
        BiasSlots(**{refused: number})


def test_product_quantisation_can_ask_for_another_multiple():
    assert Layout(384, "IP", multiple_of=math.lcm(16, 24)).width % 24 == 0


def test_one_strength_for_each_query():
    layout = Layout(3, "IP")
    asked = layout.encode_queries(np.ones((2, 3)), [0.0, 1.0])
    np.testing.assert_array_equal(asked[:, layout.slot_columns.start], [0.0, -1.0])


def test_zero_vectors_stay_zero_and_are_reported():
    layout = Layout(3, "COSINE")
    items = np.array([[1, 0, 0], [0, 0, 0], [np.nan, 0, 0]], np.float32)
    np.testing.assert_array_equal(layout.invalid(items), [False, True, True])
    assert not layout.augment(items[:2], [0.5, 0.0])[1].any()
    assert not Layout(3, "IP").invalid(items[:2]).any()


@pytest.mark.parametrize(
    ("vectors", "error", "said"),
    [
        ([[1.0, 2.0]], DimensionMismatch, "3 dimensions, got 2"),
        ([1.0, 2.0, 3.0], InvalidInput, "(n, 3)"),
        ([["a", "b", "c"]], InvalidInput, "numbers"),
        ([[1, 2, 3], [1, 2, float("nan")]], NonFiniteVectors, "row 1"),
        ([[1, 2, 3], [0, 0, 0], [0, 0, 0]], ZeroVectors, "row 1, 2"),
    ],
)
def test_what_cannot_be_inserted_is_refused_by_row(vectors, error, said):
    with pytest.raises(error) as caught:
        Layout(3, "COSINE").validate_vectors(vectors)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "arguments", [(0, "IP"), (3, "HAMMING"), (3, "IP", BiasSlots(), 0), (32_768, "IP")]
)
def test_impossible_layouts_are_refused(arguments):
    with pytest.raises(InvalidParameter):
        Layout(*arguments)


@pytest.mark.parametrize(("strength", "slot"), [(float("nan"), 0), (1.0, 2), (1.0, -1)])
def test_impossible_questions_are_refused(strength, slot):
    with pytest.raises(InvalidParameter):
        Layout(3, "IP").encode_queries(np.ones((1, 3)), strength, slot=slot)


def test_there_is_at_least_one_slot():
    with pytest.raises(InvalidParameter, match="the number of slots is from 1 to 32768, got 0"):
        BiasSlots(0)


def test_biases_must_fit_the_rows():
    with pytest.raises(InvalidInput, match="biases of shape"):
        Layout(3, "IP").augment(np.ones((2, 3)), np.ones(3))


@pytest.mark.parametrize("metric", ["IP", "COSINE", "L2"])
def test_no_rows_are_stored_as_no_rows(metric):
    """The last page of a scan may be empty."""
    layout = Layout(6, metric, BiasSlots(2))
    none = np.empty((0, 6), np.float32)
    assert layout.augment(none, np.empty(0, np.float32)).shape == (0, layout.width)
    assert layout.augment(none, np.empty((0, 2), np.float32)).shape == (0, layout.width)
