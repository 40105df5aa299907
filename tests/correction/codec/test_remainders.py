"""The texts by which rows that are stored less an offset are read back bit for bit."""

import base64
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from milvus_hubness.correction.codec.remainders import (
    longest_remainder,
    remainders,
    with_remainders,
)
from milvus_hubness.errors import StateError

bit_patterns = array_shapes(min_dims=2, max_dims=2, max_side=40).flatmap(
    lambda shape: st.tuples(*[arrays(np.uint32, shape, elements=st.integers(0, 2**32 - 1))] * 2)
)


@settings(deadline=None)
@given(bit_patterns)
def test_any_two_bit_patterns_differ_by_a_text(patterns):
    rows, read = (bits.view(np.float32) for bits in patterns)
    texts = remainders(rows, read)
    assert all(len(text) <= longest_remainder(rows.shape[1]) for text in texts)
    back = with_remainders(read, texts, "rest")
    np.testing.assert_array_equal(back.view(np.uint32), patterns[0])
    for row, text in enumerate(texts):
        assert (text == "") == (patterns[0][row] == patterns[1][row]).all()


def test_the_longest_text_fits_the_field_in_the_largest_dimensions():
    rng = np.random.default_rng(0)
    for dim in (1, 2, 3_072, 5_461):
        noise = rng.integers(0, 2**32, (2, dim), np.uint32).view(np.float32)
        texts = remainders(noise, np.zeros_like(noise))
        assert max(map(len, texts)) <= longest_remainder(dim) <= 65_535


def test_a_text_of_embeddings_is_a_tenth_of_their_bytes():
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(50, 512)).astype(np.float32) / 20
    offset = rng.normal(size=512).astype(np.float32) / 40
    texts = remainders(rows, (rows - offset) + offset)
    assert 0 < np.mean([len(text) for text in texts]) < 4 * 512 / 6


def _deflated(content):
    stream = zlib.compressobj(wbits=-15)
    return base64.b64encode(stream.compress(content) + stream.flush()).decode()


@pytest.mark.parametrize(
    "text",
    [
        "no base64!",
        "AAAA",
        None,
        7,
        _deflated(bytes(31)),
        _deflated(bytes(33)),
        _deflated(bytes(10**8)),
        _deflated(bytes(32))[:-4],
    ],
    ids=["no base64", "no stream", "none", "a number", "short", "long", "bomb", "cut"],
)
def test_a_stranger_s_text_is_refused_in_one_line(text):
    with pytest.raises(StateError, match=r"field 'rest' of a row is broken.*: write the row again"):
        with_remainders(np.zeros((2, 8), np.float32), ["", text], "rest")
