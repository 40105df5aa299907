"""Every call of a MilvusClient beside the same call of a HubnessClient."""

from functools import partial

import numpy as np
import pytest
from pymilvus.exceptions import MilvusException, ParamError

from milvus_hubness import InvalidInput
from tests.support import every_call
from tests.support.catalogue import DIM, KINDS, Catalogue, assert_same, rows_there

ON_SERVERS = {"catalogue": [("COSINE", "str")]}
MADE = every_call.MADE


@pytest.fixture(scope="module", params=KINDS, ids=" ".join)
def catalogue(shared_backend, request):
    return Catalogue(shared_backend, *request.param)


class TestEveryCall(every_call.EveryCall):
    def test_rows_are_searched_by_their_keys(self, catalogue):
        """Neither Milvus Lite nor 2.3.5 does that for anyone: the client looks the vectors up."""
        asked = {"limit": 5, "output_fields": ["note", "vector"]}
        numbers = (3, 4)
        expected = catalogue.plain.search(
            catalogue.name, data=list(catalogue.items[list(numbers)]), **asked
        )
        got = catalogue.client.search(catalogue.corrected, ids=catalogue.keys(*numbers), **asked)
        assert_same(catalogue, expected, got)
        got = catalogue.client.search(
            catalogue.corrected, ids=catalogue.key(3), consistency_level=0, **asked
        )
        assert_same(catalogue, expected[0], got[0])
        with pytest.raises(MilvusException, match="no rows of these ids"):
            catalogue.client.search(catalogue.corrected, ids=catalogue.keys(9_999))

    def test_keys_may_be_numbers_of_numpy(self, catalogue):
        """pymilvus sends them as it sends Python's."""
        if catalogue.kind != "int":
            pytest.skip("texts are none")
        search = partial(catalogue.client.search, catalogue.corrected, limit=5)
        assert_same(catalogue, search(ids=[3, 4]), search(ids=[np.int64(3), np.int32(4)]))

    def test_what_is_no_key_is_refused(self, catalogue):
        for ids in ([3.0], [None]):
            with pytest.raises(ParamError) as refused:
                catalogue.client.search(catalogue.corrected, ids=ids)
            with pytest.raises(ParamError) as expected:
                catalogue.plain.search(catalogue.name, ids=ids)
            assert str(refused.value) == str(expected.value)

    def test_rows_are_searched_by_keys_with_quotes_in_them(self, changing):
        if changing.kind == "int":
            pytest.skip("numbers have none")
        row = changing.row(changing.first, changing.fresh[0], sku="sku-9\"o'hara\\")
        changing.client.insert(changing.corrected, row)
        [hits] = changing.client.search(changing.corrected, ids=row["sku"], limit=1)
        assert hits.ids == [row["sku"]]

    @pytest.mark.parametrize("question", every_call.REFUSED_HERE)
    def test_what_has_no_answer_is_refused(self, either, question):
        """Milvus answers NaN with NaN or with nothing; Lite searches by another metric than the index's."""
        asked = {"data": [either.queries[0]], **every_call.REFUSED_HERE[question](either)}
        with pytest.raises(MilvusException) as refusal:
            either.client.search(either.corrected, **asked)
        assert isinstance(refusal.value, InvalidInput)

    @pytest.mark.parametrize("method", ["insert", "upsert"])
    def test_rows_that_could_never_be_ranked_are_refused(self, either, changing, method):
        """Milvus keeps NaN; no bias can be computed of it."""
        with pytest.raises(MilvusException, match="row 0") as refusal:
            getattr(changing.client, method)(
                changing.corrected, changing.new(vector=[float("nan")] * DIM)
            )
        assert isinstance(refusal.value, InvalidInput)
        assert not rows_there(changing.client, changing.corrected, changing)
