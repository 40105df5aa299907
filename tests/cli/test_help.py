"""The help of the commands: what it says, and what it does without."""

from milvus_hubness.defaults import SHORT_METHODS
from milvus_hubness.estimators.base import ESTIMATORS, METHODS


def test_the_help_names_each_estimator():
    assert {METHODS[alias] for alias in SHORT_METHODS} == ESTIMATORS.keys()
    assert len(SHORT_METHODS) == len(ESTIMATORS)
