"""Half precision: the right bytes, and numbers of ours that lose next to nothing in it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from milvus_hubness.correction.codec.arrays import (
    SMALLEST,
    SPACING,
    StorageFormat,
    decode,
    encode,
    returned,
    rounded,
    rounded_to_sums,
    unpacked,
)
from milvus_hubness.correction.codec.base import form_of
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import BiasSlots
from milvus_hubness.errors import InvalidInput, InvalidParameter
from tests.support.galleries import METRICS, decoded

HALVES = ["float16", "bfloat16"]
NUMBERS = st.floats(-60_000, 60_000, width=32)
ROWS = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=40), elements=NUMBERS
)
BITS = {"float16": 22, "bfloat16": 16}
"""What two halves keep of a number."""


def by_torch(values, dtype):
    return torch.from_numpy(values).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", HALVES)
@given(rows=ROWS)
def test_numbers_are_rounded_and_written_as_torch_does(dtype, rows):
    theirs = by_torch(rows, dtype)
    assert np.array_equal(rounded(rows, dtype), theirs.float().numpy())
    assert encode(rows, dtype) == [row.tobytes() for row in theirs.view(torch.int16).numpy()]


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_there_is_comes_back_as_the_same_bytes(dtype):
    patterns = np.arange(1 << 16, dtype="<u2").reshape(256, 256)
    numbers = decode([row.tobytes() for row in patterns], dtype)
    again = np.frombuffer(b"".join(encode(numbers, dtype)), "<u2").reshape(256, 256)
    told = np.isnan(numbers)
    assert np.array_equal(again[~told], patterns[~told])
    assert np.isnan(decode(encode(numbers, dtype), dtype)[told]).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_vectors_are_taken_in_every_shape_that_pymilvus_gives_or_takes(dtype):
    row = rounded([[0.1, -2.5, 3.0]], dtype)
    [packed] = encode(row, dtype)
    for given_as in (packed, [packed], row[0], row[0].tolist(), row[0].astype(np.float64)):
        assert np.array_equal(decode([given_as, packed], dtype), np.vstack([row, row]))
    assert returned(row, dtype) == [packed]
    assert returned(row, "float32") == row.tolist()
    assert unpacked([1.0, 2.0], dtype) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("given_as", "said"),
    [([b"123"], "3 bytes"), ([b"12", b"1234"], "one length"), (["ab"], "numbers")],
)
def test_what_is_no_vector_is_refused(given_as, said):
    with pytest.raises(InvalidInput, match=said):
        decode(given_as, "float16")


@pytest.mark.parametrize(("dtype", "size"), [("float16", 7e4), ("bfloat16", 3.4e38)])
def test_what_does_not_fit_is_refused_and_infinity_stays(dtype, size):
    with pytest.raises(InvalidInput, match=dtype):
        rounded([1.0, size], dtype)
    assert np.isinf(rounded([np.inf, -np.inf], dtype)).all()


@pytest.mark.parametrize("dtype", HALVES)
@given(numbers=hnp.arrays(np.float32, 50, elements=st.floats(-60_000, 60_000, width=32)))
def test_two_halves_keep_twice_the_bits(dtype, numbers):
    found = rounded_to_sums(numbers, dtype)
    assert np.all(
        np.abs(found - numbers) <= 2.0 ** -BITS[dtype] * np.abs(numbers) + SMALLEST[dtype] / 2
    )
    assert np.array_equal(rounded_to_sums(found, dtype), found)


@st.composite
def forms(draw):
    layout = Layout(
        draw(st.integers(1, 40)),
        draw(st.sampled_from(METRICS)),
        BiasSlots(
            draw(st.integers(1, 8)),
            scale=draw(st.sampled_from([1.0, 0.25, 4.0])),
            spread=draw(st.sampled_from([1, 1, 4])),
        ),
    )
    return layout, form_of(layout, draw(st.sampled_from(["float32", *HALVES])))


@given(case=forms(), seed=st.integers(0, 99), strength=st.floats(-2, 2))
def test_products_in_the_field_are_those_of_the_rows(case, seed, strength):
    layout, form = case
    rng = np.random.default_rng(seed)
    items = rounded(rng.standard_normal((6, layout.dim)), form.dtype)
    queries = rounded(rng.standard_normal((4, layout.dim)), form.dtype)
    layout = measured_on(layout, items)
    stored = layout.augment(items, rng.standard_normal((6, layout.slots.count)).astype(np.float32))
    asked = layout.encode_queries(queries, strength, slot=layout.slots.count - 1)
    sent = [
        decode(form.encode_queries(asked), form.dtype),
        decode(form.encode_rows(stored), form.dtype),
    ]
    assert all(each.shape[1] == form.width for each in sent)
    assert form.width % layout.multiple_of == 0
    found = sent[0].astype(float) @ sent[1].T.astype(float)
    wanted = rounded(asked[:, : layout.dim], form.dtype).astype(float) @ rounded(
        stored[:, : layout.dim], form.dtype
    ).T.astype(float)
    ours = asked[:, layout.dim :].astype(float) @ stored[:, layout.dim :].T.astype(float)
    size = np.abs(asked[:, layout.dim :]).astype(float) @ np.abs(stored[:, layout.dim :]).T.astype(
        float
    )
    bits = BITS.get(form.dtype, 24) - 2
    assert np.all(np.abs(found - wanted - ours) <= 2.0**-bits * size + 1e-6)


@given(case=forms(), seed=st.integers(0, 99))
def test_rows_are_joined_to_what_was_split(case, seed):
    layout, form = case
    rng = np.random.default_rng(seed)
    items = rounded(rng.standard_normal((5, layout.dim)), form.dtype)
    stored = layout.augment(items, rng.standard_normal((5, layout.slots.count)).astype(np.float32))
    revert = form.joined(decode(form.encode_rows(stored), form.dtype))
    assert revert.shape == stored.shape
    assert np.array_equal(revert[:, : layout.dim], rounded(stored[:, : layout.dim], form.dtype))
    assert np.array_equal(
        revert[:, layout.dim :], rounded_to_sums(stored[:, layout.dim :], form.dtype)
    )
    assert np.array_equal(form.joined(form.split(revert)), revert)


@pytest.mark.parametrize("dtype", HALVES)
def test_room_for_more_numbers_in_the_same_width_changes_nothing(dtype):
    narrow, wide = (
        form_of(Layout(20, "IP", BiasSlots(2)), dtype),
        form_of(Layout(20, "IP", BiasSlots(4)), dtype),
    )
    assert narrow.width == wide.width == 32
    rows = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
    rows[:, 24:] = 0
    assert narrow.encode_rows(rows) == wide.encode_rows(rows)
    assert np.array_equal(narrow.joined(narrow.split(rows)), wide.joined(wide.split(rows)))


@pytest.mark.parametrize("dtype", HALVES)
@given(
    rows=hnp.arrays(np.float32, (4, 6), elements=st.floats(-200, 200, width=32)),
    norm=st.floats(1e-2, 1e3),
)
def test_cosine_rows_come_back_within_one_unit_in_the_last_place(dtype, rows, norm):
    layout, form = Layout(6, "COSINE"), form_of(Layout(6, "COSINE"), dtype)
    given_rows = rounded(rows * np.float32(norm / 200), dtype)
    norms = layout.norms(given_rows)
    stored = form.encode_rows(layout.augment(given_rows, np.zeros(4, np.float32)))
    revert = decoded(layout, form.joined(decode(stored, dtype)), norms, dtype)
    floor = SMALLEST[dtype] * np.maximum(norms, 1)[:, None]
    assert np.all(
        np.abs(revert - given_rows) <= np.maximum(SPACING[dtype] * np.abs(given_rows), floor)
    )


def test_vectors_alone_are_stored_as_they_are():
    form = StorageFormat("bfloat16", 3)
    rows = np.array([[1, 2, 3]], np.float32)
    assert form.width == 3
    assert form.encode_rows(rows) == form.encode_queries(rows) == encode(rows, "bfloat16")
    assert form.joined(rows) is rows


def test_a_field_too_wide_for_milvus_is_refused():
    layout = Layout(32_760, "IP")
    assert form_of(layout, "float32").width == 32_768
    with pytest.raises(InvalidParameter, match="32765"):
        form_of(Layout(32_765, "IP", BiasSlots(2)), "float16")
