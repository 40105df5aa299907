"""The congruence suite, its corrected side through the proxy with a plain MilvusClient."""

import pytest
from pymilvus.exceptions import MilvusException

from tests.support import client_suite
from tests.support.galleries import METRICS
from tests.support.index_hints import Divided
from tests.support.pairs import ITEMS, Pair, bad_rows, restored


@pytest.fixture(
    scope="module",
    params=[
        each if each == "COSINE" else pytest.param(each, marks=pytest.mark.beyond_contract)
        for each in METRICS
    ],
)
def shared_pair(shared_backend, request):
    return Pair(shared_backend, request.param)


@pytest.fixture
def pair(shared_pair):
    yield from restored(shared_pair)


class TestCorrectedCollection(client_suite.CorrectedCollection):
    """Through a MilvusClient behind the proxy."""


def test_bad_rows_are_refused_and_nothing_is_written(pair):
    for rows, _, _ in bad_rows(pair.metric):
        for write in (pair.client.insert, pair.client.upsert):
            with pytest.raises(MilvusException):
                write(pair.corrected, rows)
    [counted] = pair.client.query(pair.corrected, output_fields=["count(*)"])
    assert counted["count(*)"] == ITEMS


@pytest.mark.lite_only
def test_what_a_client_writes_has_index_hints(backend):
    Divided(backend).assert_writes_are_filled()
