"""Verdicts, tuning and reports that compare items by their kinds."""

import numpy as np
import pytest

from milvus_hubness import QueryBank
from milvus_hubness.quality.tuning import judge_bank
from tests.support.mixed_kinds import mixed_kinds, scores_by_kind


@pytest.fixture(scope="module")
def mixed():
    return mixed_kinds()


@pytest.mark.parametrize("factor", [0.0, 1.0, 0.4])
def test_products_of_the_tables_are_the_scores_of_searches(mixed, factor):
    kinds = mixed.kinds
    table = kinds.item_table(mixed.items).astype(float)
    sent = kinds.query_table(mixed.queries, factor).astype(float)
    np.testing.assert_allclose(
        sent @ table.T, scores_by_kind(mixed, mixed.queries, factor), atol=2e-6
    )


def test_less_the_means_of_kinds_a_bank_of_queries_is_no_bank_of_items(mixed):
    """Both have the mean 0 then, and would be taken for one thing."""
    bank = QueryBank(mixed.bank)
    judged = judge_bank(bank, mixed.items, kinds=mixed.kinds)
    assert judged.verdict == "apply"
    assert "compared by kind" in judged.reason

    kinds = mixed.kinds
    at_one_point = QueryBank(kinds.centred_queries(mixed.bank))
    mistaken = judge_bank(at_one_point, kinds.centred_items(mixed.items))
    assert "looks like a bank of items" in mistaken.reason
