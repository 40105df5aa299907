"""One query is packed as a request has it: what several are encoded to, by fewer steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from milvus_hubness.correction.codec.index_hints import mean_of
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import HalfSquares
from milvus_hubness.errors import DimensionMismatch, HubnessError, InvalidInput, NonFiniteVectors

DIM = 7
METRICS = ("COSINE", "IP", "L2")
FORMS = {
    "array": lambda query: [query],
    "list": lambda query: [query.tolist()],
    "matrix": lambda query: query[None],
}
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
queries = arrays.arrays(np.float32, DIM, elements=numbers)


def packed(layout, given):
    """The numbers of what is sent for one query, float32 (1, width)."""
    [content] = layout.sender(0.5).packed(given)
    return np.frombuffer(bytes(content), np.float32)[None]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("form", FORMS)
@given(query=queries)
def test_one_query_is_sent_as_each_of_several(metric, form, query):
    layout = Layout(dim=DIM, metric=metric)
    alone = FORMS[form](query)
    try:
        several = layout.sender(0.5)(np.stack([query, np.ones(DIM, np.float32)]))[:1]
    except HubnessError as error:
        with pytest.raises(type(error)):
            packed(layout, alone)
        return
    np.testing.assert_array_max_ulp(packed(layout, alone), several, 1)


@pytest.mark.parametrize("form", FORMS)
def test_a_unit_vector_is_sent_as_it_is(form):
    query = np.float32([0.6, 0.8, 0, 0, 0, 0, 0])
    sent = packed(Layout(dim=DIM, metric="COSINE"), FORMS[form](query))
    assert sent[0, :DIM].tobytes() == query.tobytes()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_query_that_is_not_finite_is_refused(metric, form, number):
    query = np.ones(DIM, np.float32)
    query[2] = number
    with pytest.raises(NonFiniteVectors, match="query 0"):
        packed(Layout(dim=DIM, metric=metric), FORMS[form](query))


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ([0.5] * (DIM - 1), DimensionMismatch),
        (np.ones(DIM + 1, np.float32), DimensionMismatch),
        (["a"] * DIM, InvalidInput),
        ([1e39] * DIM, NonFiniteVectors),
        ([1j] * DIM, InvalidInput),
    ],
)
def test_one_query_that_does_not_fit_is_refused(query, error):
    with pytest.raises(error):
        packed(Layout(dim=DIM, metric="COSINE"), [query])


def test_a_mean_of_the_layout_counts_for_one_query_too():
    rng = np.random.default_rng(0)
    mean = mean_of(rng.standard_normal((50, DIM)).astype(np.float32) + 40)
    layout = Layout(dim=DIM, metric="L2", half_squares=HalfSquares(mean=mean))
    query = rng.standard_normal(DIM).astype(np.float32)
    sent = packed(layout, [query])
    np.testing.assert_array_equal(sent, layout.encode_queries([query], 0.5))
    assert not np.allclose(sent[0, :DIM], query)
