"""Errors of ours that callers of pymilvus catch."""

import pytest
from pymilvus.exceptions import MilvusException

from milvus_hubness import DimensionMismatch, InvalidInput, UnsupportedOperation
from milvus_hubness.milvus.client.steps import as_milvus


@pytest.mark.parametrize("kind", [InvalidInput, DimensionMismatch, UnsupportedOperation])
def test_a_refusal_is_of_both_kinds_and_says_the_same(kind):
    refusal = as_milvus(kind("row 3: too short"))
    assert isinstance(refusal, kind)
    assert isinstance(refusal, MilvusException)
    assert isinstance(refusal, ValueError) == issubclass(kind, ValueError)
    assert str(refusal) == refusal.message == "row 3: too short"
    assert refusal.is_input_error == issubclass(kind, InvalidInput)
    assert type(refusal).__name__ == kind.__name__
    assert type(as_milvus(kind("another"))) is type(refusal)
    assert as_milvus(refusal) is refusal
