"""Every call of a MilvusClient beside the same call of a MilvusClient behind a proxy."""

import pytest
from pymilvus.exceptions import MilvusException

from tests.milvus.proxy.running import at
from tests.support import every_call
from tests.support.catalogue import DIM, KINDS, Catalogue, rows_there

MADE = every_call.MADE
ON_SERVERS = {"catalogue": [("COSINE", "str")]}


@pytest.fixture(
    scope="session",
    params=["lite", pytest.param("server-2.3.5", marks=pytest.mark.beyond_contract)],
)
def running(request):
    return at(request)


@pytest.fixture(
    scope="module",
    params=[KINDS[0], *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[1:])],
    ids=" ".join,
)
def catalogue(shared_backend, request):
    return Catalogue(shared_backend, *request.param)


class TestEveryCall(every_call.EveryCall):
    @pytest.mark.parametrize("question", every_call.REFUSED_HERE)
    def test_what_has_no_answer_is_refused(self, either, question):
        asked = {"data": [either.queries[0]], **every_call.REFUSED_HERE[question](either)}
        with pytest.raises(MilvusException, match=r"NaN|metric type") as refusal:
            either.client.search(either.corrected, **asked)
        assert refusal.value.code == 1100

    @pytest.mark.parametrize("method", ["insert", "upsert"])
    def test_rows_that_could_never_be_ranked_are_refused(self, either, changing, method):
        rows = changing.new(vector=[float("nan")] * DIM)
        with pytest.raises(MilvusException, match="row 0"):
            getattr(changing.client, method)(changing.corrected, rows)
        assert not rows_there(changing.client, changing.corrected, changing)
