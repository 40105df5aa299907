"""Kinds of items: scores relative to the means of kinds, and rows that are stored less offsets of kinds."""

import base64
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.codec.arrays import rows_as_text, rows_in, unit_directions
from milvus_hubness.correction.codec.base import RowBiases, form_of
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import BiasSlots, KindColumns
from milvus_hubness.correction.estimators import NNN, Blend
from milvus_hubness.correction.fitted import Correction, measured_kinds
from milvus_hubness.correction.items import Items
from milvus_hubness.correction.kinds import (
    UNKNOWN,
    KindCounts,
    KindMeans,
    KindRule,
    Kinds,
    expect_room,
    kinds_from,
    rule_of_field,
)
from milvus_hubness.correction.overrides import Overrides
from milvus_hubness.errors import InvalidInput, InvalidParameter
from tests.support.galleries import similarity, single_queries, vector_codec, vectors

RULE = KindRule(field="kind", values=("image", "text", "video"))


def two_means_apart(rng, count, dim):
    """Items of three kinds, which lie apart, with their numbers; some have none."""
    numbers = rng.integers(-1, 3, count)
    apart = rng.normal(size=(4, dim))
    items = rng.normal(size=(count, dim)) + apart[numbers]
    return items.astype(np.float32), numbers


def wanted(layout, kinds, queries, items, numbers, biases=0.0, strength=0.0, factor=1.0):
    """The score in float64: that of vectors relative to their means, which an item at the mean of all has raw."""
    q, r = queries.astype(float), items.astype(float)
    if layout.metric == "COSINE":
        q, r = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (q, r))
    means = np.vstack([kinds.of_kinds, kinds.overall]).astype(float)
    mean_query, overall = kinds.mean_query.astype(float), kinds.overall.astype(float)
    centred = q - factor * mean_query
    scores = centred @ r.T - factor * centred @ (means[numbers] - overall).T
    return scores + factor * mean_query @ overall - strength * biases


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    metric=st.sampled_from(["IP", "COSINE"]),
    dim=st.integers(2, 40),
    scale=st.sampled_from([1.0, 1 / 16, 2.0**-6]),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    strength=st.sampled_from([0.0, 0.5, 1.0]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    is_moved=st.booleans(),
)
def test_what_the_database_computes_is_the_score_relative_to_the_means(
    seed, metric, dim, scale, factor, strength, dtype, is_moved
):
    rng = np.random.default_rng(seed)
    offsets = rows_as_text(rng.normal(size=(3, dim))) if is_moved else ""
    layout = Layout(dim, metric, BiasSlots(2), kinds=KindColumns(3, scale=scale, offsets=offsets))
    items, numbers = two_means_apart(rng, 12, dim)
    queries = (rng.normal(size=(5, dim)) + rng.normal(size=dim)).astype(np.float32)
    biases = rng.normal(size=12).astype(np.float32)
    kinds = Kinds.measured(
        RULE, layout.reduce_items(items), numbers, layout.reduce_queries(queries)
    )
    weights = kinds.weights(factor)

    form = form_of(layout, dtype)
    stored = layout.augment(items, biases, kinds=numbers)
    sent = layout.encode_queries(queries, strength, slot=1, kinds=weights)
    if dtype == "float32":
        products = sent.astype(float) @ stored.astype(float).T
    else:
        decode = np.float16 if dtype == "float16" else None
        rows = form.encode_rows(stored)
        asked = form.encode_queries(sent)
        both = [
            np.frombuffer(b"".join(rows_of), decode).astype(float)
            if decode
            else (np.frombuffer(b"".join(rows_of), "<u2").astype(np.uint32) << 16)
            .view(np.float32)
            .astype(float)
            for rows_of in (rows, asked)
        ]
        products = both[1].reshape(5, -1) @ both[0].reshape(12, -1).T
    scores = layout.scores(products, queries, strength)

    expected = wanted(layout, kinds, queries, items, numbers, biases, strength, factor)
    tolerance = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 2e-1}[dtype]
    size = np.abs(expected).max() + 1 + np.abs(biases).max()
    np.testing.assert_allclose(scores, expected, atol=tolerance * size)
    np.testing.assert_array_equal(layout.held_kinds(stored), numbers)
    if not factor and not strength:
        np.testing.assert_allclose(
            scores, similarity(queries, items, metric), atol=tolerance * size
        )


bits = st.integers(0, 2**32 - 1)
lengths = st.integers(2, 12)


# Among the rows are infinities, NaNs and the largest numbers, of which NumPy warns.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(deadline=None)
@given(data=st.data(), dim=lengths, metric=st.sampled_from(["IP", "COSINE"]))
def test_rows_of_each_kind_are_read_back_to_the_last_place(data, dim, metric):
    """Rows of any size under IP, and unit ones under COSINE; then with other biases and other kinds."""
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    numbers, other_numbers = rng.integers(-1, 3, (2, 6))
    exponents = data.draw(st.lists(st.integers(-45, 30), min_size=dim, max_size=dim))
    rows = (rng.normal(size=(6, dim)) * 10.0 ** np.array(exponents)).astype(np.float32)
    rows[0, :2] = -0.0, 0.0
    if metric == "IP":
        rows[3:5] = data.draw(arrays(np.uint32, (2, dim), elements=bits)).view(np.float32)
    else:
        rows = unit_directions(rows).astype(np.float32)
    offsets = rows_as_text(rng.normal(size=(3, dim)))
    layout = Layout(dim, metric, BiasSlots(2), kinds=KindColumns(3, scale=0.25, offsets=offsets))
    codec = vector_codec(layout)

    stored = codec.encode_rows(rows, RowBiases({0: np.ones(6)}, 1, kinds=numbers))
    assert stored.keys() == {codec.field, *codec.hidden_fields}
    first_read = codec.decode_rows(stored)
    assert_within_units(1, first_read, rows, layout.kinds.offsets_of(numbers, dim))

    for biases in (
        RowBiases({0: np.full(6, 2.0)}, 2),
        RowBiases({1: np.full(6, 3.0)}, 3, kinds=numbers),
    ):
        stored = {**stored, **codec.set_biases(stored, biases)}
        np.testing.assert_array_equal(codec.decode_rows(stored), first_read)

    moved = codec.set_biases(stored, RowBiases({0: np.full(6, 4.0)}, 4, kinds=other_numbers))
    stored = {**stored, **moved}
    sizes = np.maximum(
        np.abs(layout.kinds.offsets_of(numbers, dim)),
        np.abs(layout.kinds.offsets_of(other_numbers, dim)),
    )
    assert_within_units(2, codec.decode_rows(stored), rows, sizes)
    np.testing.assert_array_equal(codec.read_kinds(stored), other_numbers)
    np.testing.assert_array_equal(codec.read_biases(stored), [[4, 3]] * 6)


def assert_within_units(units, read, rows, offsets):
    """A number is within so many units in the last place of itself or its offset; others are equal."""
    is_rounded = (offsets != 0) & np.isfinite(rows)
    np.testing.assert_array_equal(read[~is_rounded], rows[~is_rounded])
    larger = np.maximum(np.abs(rows), np.abs(offsets)).astype(np.float64)
    differences = np.abs(read[is_rounded].astype(np.float64) - rows[is_rounded])
    assert (differences <= units * np.spacing(larger.astype(np.float32)[is_rounded])).all()


def test_rows_lie_where_the_offsets_of_their_kinds_put_them():
    rng = np.random.default_rng(4)
    items, numbers = two_means_apart(rng, 400, 10)
    means = np.stack([items[numbers == kind].mean(axis=0) for kind in range(3)])
    offsets = rows_as_text(means - means[1])
    layout = Layout(10, "IP", kinds=KindColumns(3, offsets=offsets))
    stored = layout.augment(items, np.zeros(400), kinds=numbers)[:, :10]
    for kind in range(3):
        np.testing.assert_allclose(stored[numbers == kind].mean(axis=0), means[1], atol=0.03)
    np.testing.assert_array_equal(stored[numbers == -1], items[numbers == -1])


def test_weights_of_another_layout_are_no_others():
    """What searches send is computed once, for each layout and each factor."""
    rng = np.random.default_rng(4)
    items, numbers = two_means_apart(rng, 30, 8)
    layouts = [
        Layout(8, "IP", kinds=KindColumns(3, scale=scale, offsets=offsets))
        for scale in (1.0, 0.25)
        for offsets in ("", rows_as_text(rng.normal(size=(3, 8))))
    ]
    kinds = Kinds.measured(RULE, items, numbers, items[:9] + 1)
    query = items[:2]
    for _ in range(2):
        for layout in layouts:
            stored = layout.augment(items, np.zeros(30), kinds=numbers)
            for factor in (1.0, 0.5, 0.0):
                sent = layout.encode_queries(query, 0.0, kinds=kinds.weights(factor))
                expected = wanted(layout, kinds, query, items, numbers, factor=factor)
                np.testing.assert_allclose(sent @ stored.T, expected, atol=2e-5)


def test_offsets_need_kinds_of_that_number_and_float32():
    three = rows_as_text(np.ones((3, 8)))
    with pytest.raises(InvalidParameter, match="the number of kinds is from 1 to"):
        KindColumns(0, offsets=three)
    with pytest.raises(InvalidParameter, match="are not 2 means of 8 dimensions"):
        Layout(8, "IP", kinds=KindColumns(2, offsets=three))
    with pytest.raises(InvalidParameter, match="is not base64"):
        Layout(8, "IP", kinds=KindColumns(2, offsets="no base64!"))


def test_a_row_without_a_kind_counts_as_an_average_item():
    layout = Layout(4, "IP", kinds=KindColumns(3))
    items = np.eye(4, dtype=np.float32)
    numbers = np.array([0, 1, 1, 2])
    kinds = Kinds.measured(RULE, items, numbers, np.ones((3, 4), np.float32))
    np.testing.assert_allclose(kinds.overall, items.mean(0), atol=5e-3)
    query = np.array([[1, 2, 3, 4]], np.float32)
    average = kinds.overall[None, :]
    stored = layout.augment(average, np.zeros(1), kinds=[UNKNOWN])
    sent = layout.encode_queries(query, kinds=kinds.weights())
    scores = layout.scores(sent @ stored.T, query)
    np.testing.assert_allclose(scores, query @ average.T, rtol=1e-5)


def test_biases_are_those_of_vectors_relative_to_their_means():
    rng = np.random.default_rng(3)
    layout = Layout(16, "COSINE", kinds=KindColumns(3))
    items, numbers = two_means_apart(rng, 200, 16)
    bank = single_queries(vectors(rng, 90, 16))
    kinds = measured_kinds(layout, RULE, items, numbers, bank)
    correction = Correction.fit(
        layout, NNN(8, 0.75), bank, gallery=items, kinds=kinds, gallery_kinds=numbers
    )

    means = np.vstack([kinds.of_kinds, kinds.overall]).astype(float)
    unit = items / np.linalg.norm(items.astype(float), axis=1, keepdims=True)
    asked = bank.vectors / np.linalg.norm(bank.vectors.astype(float), axis=1, keepdims=True)
    scores = (asked - kinds.mean_query) @ (unit - means[numbers]).T
    expected = 0.75 * np.sort(scores, axis=0)[-8:].mean(axis=0)
    np.testing.assert_allclose(correction.centred(items, kinds=numbers), expected, atol=1e-5)

    values = np.array(["image", "text", "video", None], object)[numbers]
    rows = Items(list(range(200)), [{"kind": value} for value in values])
    np.testing.assert_allclose(correction.centred(items, rows), expected, atol=1e-5)
    biases, _ = correction.of_rows(items, rows, are_new=False)
    np.testing.assert_allclose(biases, expected, atol=1e-5)
    with pytest.raises(RuntimeError, match="follow from their field 'kind'"):
        correction.centred(items)


def test_a_log_that_repeats_a_query_moves_no_mean():
    """A bank that is a log says how often queries come, not where queries lie."""
    rng = np.random.default_rng(5)
    layout = Layout(12, "IP", kinds=KindColumns(3))
    items, numbers = two_means_apart(rng, 60, 12)
    queries = vectors(rng, 40, 12)
    repeated = np.vstack([queries, np.repeat(queries[:1], 500, axis=0)])
    groups = np.concatenate([np.arange(40), np.zeros(500, int)])
    once = measured_kinds(layout, RULE, items, numbers, single_queries(queries))
    log = measured_kinds(layout, RULE, items, numbers, QueryBank(repeated, groups=groups))
    np.testing.assert_allclose(log.mean_query, once.mean_query, atol=1e-2)


def test_further_profiles_leave_the_kinds_where_they_are():
    layout = Layout(9, "IP", BiasSlots(2), kinds=KindColumns(3, scale=0.25))
    items, numbers = two_means_apart(np.random.default_rng(1), 20, 9)
    stored = layout.augment(items, np.ones(20), kinds=numbers)
    wider = replace(layout, slots=BiasSlots(3))
    assert wider.width == layout.width
    changed = wider.with_biases(stored, {2: np.full(20, 5.0)})
    np.testing.assert_array_equal(wider.held_kinds(changed), numbers)
    np.testing.assert_array_equal(wider.biases(changed, slice(None)), [[1, 1, 5]] * 20)


def test_new_biases_leave_the_kinds_and_new_kinds_the_biases():
    layout = Layout(10, "COSINE", kinds=KindColumns(3))
    items, numbers = two_means_apart(np.random.default_rng(1), 20, 10)
    stored = layout.augment(items, np.ones(20), kinds=numbers)
    assert (layout.held_kinds(layout.with_biases(stored, {0: np.zeros(20)})) == numbers).all()
    moved = layout.with_biases(stored, {}, kinds=(numbers + 2) % 4 - 1)
    assert (layout.held_kinds(moved) == (numbers + 2) % 4 - 1).all()
    np.testing.assert_array_equal(layout.biases(moved), np.ones(20))


@given(seed=st.integers(0, 10**6), count=st.integers(1, 5), dim=st.integers(1, 30))
def test_means_are_read_back_to_a_hundredth(seed, count, dim):
    rows = np.random.default_rng(seed).normal(size=(count, dim)) * 10.0 ** (seed % 20 - 10)
    read = rows_in(rows_as_text(rows), count, dim)
    largest = np.abs(rows).max(axis=1, keepdims=True)
    assert (np.abs(read - rows) <= largest / 250).all()


def test_values_are_told_apart_by_their_type():
    rule = KindRule(field="kind", values=(True, 1, "1"))
    values = [1, True, "1", np.int64(1), np.bool_(True), 1.0, None, [1], {"a": 1}, "True"]
    assert rule.numbers_of_values(values).tolist() == [1, 0, 2, 1, 0, -1, -1, -1, -1, -1]
    again = KindRule.model_validate_json(rule.model_dump_json())
    assert again.numbers_of_values(values).tolist() == [1, 0, 2, 1, 0, -1, -1, -1, -1, -1]


def test_the_side_of_a_plane_is_a_kind_at_any_length():
    direction = np.array([[0.0, 1.0]])
    rule = KindRule(direction=rows_as_text(direction), threshold=0.5)
    rows = np.array([[1, 0], [0, 3], [0.1, 0.1], [0, 1e-3], [0, 0], [np.nan, 1]], np.float32)
    assert rule.numbers_of(rows, None).tolist() == [0, 1, 1, 1, UNKNOWN, UNKNOWN]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({f"v{i}": 100 for i in range(17)}, "has more than 16 values, such as 'v0', 'v1', 'v2'"),
        ({"image": 500}, "does not have two kinds of at least 30 rows each, only 'image' \\(500"),
        ({"image": 500, "text": 29}, "only 'image' \\(500 rows\\), 'text' \\(29 rows\\)"),
        ({}, "only rows without a value: leave the kinds out"),
    ],
)
def test_too_many_values_or_one_kind_is_refused_in_one_line(counts, message):
    with pytest.raises(InvalidInput, match=message) as caught:
        rule_of_field("modality", "products", KindCounts(list(counts.items()), 0))
    assert "\n" not in str(caught.value)


def test_a_rare_value_is_no_kind():
    rule = rule_of_field("lang", "docs", KindCounts([("en", 400), ("de", 30), ("xx", 3)], 5))
    assert rule.values == ("de", "en")


def test_truth_values_and_numbers_are_kinds_of_their_own_even_with_equal_means():
    means = KindMeans(means=rows_as_text(np.ones((3, 4))), shares=(0.5, 0.5))
    truths = KindRule(field="kind", values=(False, True))
    numbers = KindRule(field="kind", values=(0, 1))
    assert kinds_from(truths, means, 4).rule.numbers_of_values([True, 1]).tolist() == [1, -1]
    assert kinds_from(numbers, means, 4).rule.numbers_of_values([True, 1]).tolist() == [-1, 1]


def test_long_texts_are_descriptions_and_no_kinds():
    rule = KindRule(field="kind", values=("a", "b" * 255))
    assert rule.numbers_of_values(["a", "b" * 255, "b" * 256, ""]).tolist() == [0, 1, -1, -1]


def test_names_have_no_control_characters():
    rule = KindRule(field="kind", values=("a\n\x1b[31m", "b"))
    assert rule.names == ("a\\n\\x1b[31m", "b")


def test_means_must_fit_the_state():
    with pytest.raises(InvalidInput, match="have 24,000 numbers in the means"):
        expect_room(RULE, 6_000)


@pytest.mark.parametrize("factor", [-1, float("nan"), float("inf"), "1", True, [1]])
def test_a_factor_of_kinds_is_a_number_from_0_up(factor):
    with pytest.raises(InvalidParameter, match="kinds is a number from 0 up"):
        Overrides(kinds=factor).checked()


@pytest.mark.parametrize(
    "values",
    [
        {"field": "kind", "values": ["a"]},
        {"field": "kind", "values": ["a", "a"]},
        {"field": "kind", "values": ["a", "b"], "direction": "AAAA"},
        {},
        {"direction": "no base64!"},
        {"field": "kind", "values": [str(i) for i in range(17)]},
    ],
)
def test_a_stranger_s_rule_is_refused(values):
    with pytest.raises(ValidationError):
        KindRule.model_validate_json(json.dumps(values))


def test_a_stranger_s_means_are_refused():
    good = rows_as_text(np.ones((4, 3)))
    scales = np.full(4, np.inf, "<f4").tobytes()
    not_finite = base64.b64encode(scales + bytes(12)).decode()
    assert Kinds(RULE, KindMeans(means=good, shares=(0.2, 0.3, 0.5)), 3).dim == 3
    for means, shares, dim in [
        (good, (0.5, 0.5), 3),
        (good, (0.2, 0.3, 0.5), 4),
        (not_finite, (0.2, 0.3, 0.5), 3),
    ]:
        with pytest.raises(InvalidParameter):
            Kinds(RULE, KindMeans(means=means, shares=shares), dim)


@pytest.mark.parametrize(
    ("metric", "spread", "words"),
    [("L2", 1, "are for IP and COSINE, not for L2"), ("IP", 8, "with a spread of 1, got 8")],
)
def test_layouts_without_room_for_kinds_refuse_them(metric, spread, words):
    with pytest.raises(InvalidParameter, match=f"columns for kinds .*{words}"):
        Layout(8, metric, BiasSlots(spread=spread), kinds=KindColumns(2))


def test_a_target_bank_is_refused():
    rng = np.random.default_rng(0)
    layout = Layout(8, "IP", kinds=KindColumns(3))
    items, numbers = two_means_apart(rng, 50, 8)
    bank = single_queries(vectors(rng, 80, 8))
    kinds = measured_kinds(layout, RULE, items, numbers, bank)
    with pytest.raises(InvalidInput, match="a target bank has no kinds"):
        Correction.fit(
            layout,
            Blend(),
            bank,
            gallery=items,
            target_bank=bank,
            kinds=kinds,
            gallery_kinds=numbers,
        )
