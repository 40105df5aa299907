"""Every call of a MilvusClient on a plain collection beside the same call of the same client on a corrected
one behind a proxy of strength 0. Whoever compares what comes back must not be able to tell which is which."""

import pytest
from pymilvus.exceptions import MilvusException

from tests.congruence import test_every_call as suite
from tests.proxy.running import at

MADE = suite.MADE
ON_SERVERS = {"catalogue": [("COSINE", "str")]}

IN_OTHER_WORDS = {
    "test_rows_are_searched_by_their_keys",
    "test_rows_are_searched_by_keys_with_quotes_in_them",
    "test_what_has_no_answer_is_refused",
    "test_rows_that_could_never_be_ranked_are_refused",
}
"""Tests of what a HubnessClient alone raises, or does before it asks the server."""

changing, either = suite.changing, suite.either
globals().update(
    {name: test for name, test in vars(suite).items() if name.startswith("test_") and name not in IN_OTHER_WORDS}
)


KINDS = [pytest.param(kind, marks=pytest.mark.long if at else ()) for at, kind in enumerate(suite.KINDS)]


@pytest.fixture(scope="session", params=["lite", pytest.param("server-2.3.5", marks=pytest.mark.beyond_contract)])
def running(request):
    return at(request)


@pytest.fixture(scope="module", params=KINDS, ids=" ".join)
def catalogue(shared_backend, request):
    return suite.Catalogue(shared_backend, *request.param)


@pytest.mark.parametrize("question", suite.REFUSED_HERE)
def test_what_has_no_answer_is_refused(either, question):
    asked = {"data": [either.queries[0]], **suite.REFUSED_HERE[question](either)}
    with pytest.raises(MilvusException, match=r"NaN|metric type") as refusal:
        either.client.search(either.corrected, **asked)
    assert refusal.value.code == 1100


@pytest.mark.parametrize("method", ["insert", "upsert"])
def test_rows_that_could_never_be_ranked_are_refused(either, changing, method):
    rows = changing.new(vector=[float("nan")] * suite.DIM)
    with pytest.raises(MilvusException, match="row 0"):
        getattr(changing.client, method)(changing.corrected, rows)
    assert not suite.rows_there(changing.client, changing.corrected, changing)
