"""The congruence suite, its corrected side through the proxy with a plain MilvusClient."""

import pytest
from pymilvus.exceptions import MilvusException

from tests.congruence import test_client
from tests.congruence.test_client import (  # noqa: F401
    pair,
    test_an_alias_is_as_good_as_the_name,
    test_hidden_columns_show_only_when_named,
    test_new_rows_are_corrected_on_the_way_in,
    test_partial_upsert_leaves_vector_and_bias,
    test_range_search_is_in_corrected_scores,
    test_scores_and_ranking_are_the_oracles,
    test_strength_of_the_client_and_of_the_collection,
    test_strength_zero_is_the_plain_search,
    test_upsert_moves_the_bias_with_the_vector_and_delete_deletes,
)
from tests.congruence.test_index_hints import test_what_a_client_writes_has_them  # noqa: F401
from tests.support.galleries import METRICS


@pytest.fixture(
    scope="module",
    params=[
        each if each == "COSINE" else pytest.param(each, marks=pytest.mark.beyond_contract)
        for each in METRICS
    ],
)
def shared_pair(shared_backend, request):
    return test_client.Pair(shared_backend, request.param)


def test_bad_rows_are_refused_and_nothing_is_written(pair):  # noqa: F811
    for rows, _, _ in test_client.bad_rows(pair.metric):
        for write in (pair.client.insert, pair.client.upsert):
            with pytest.raises(MilvusException):
                write(pair.corrected, rows)
    [counted] = pair.client.query(pair.corrected, output_fields=["count(*)"])
    assert counted["count(*)"] == test_client.ITEMS
