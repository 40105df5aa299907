"""Arguments of a plan that cannot be are one line each, before the database is asked for anything."""

import numpy as np
import pytest

from milvus_hubness import (
    Copy,
    InvalidInput,
    InvalidParameter,
    Recipe,
    RefreshOptions,
    plan_correction,
)
from milvus_hubness.jobs.migration.options import MigrationOptions


def planned(**changed):
    """Plan a migration in no database."""
    words = {"gate": changed.pop("gate")} if "gate" in changed else {}
    plan_correction(None, "products", Recipe(np.eye(4), **words), Copy(**changed))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(
            ("client_ttl", value, "client_ttl must be a number of seconds from 0 up, not")
            for value in ("5", -1, float("nan"), float("inf"), None, True)
        ),
        ("index_type", 5, "index_type must be a text such as 'HNSW', not 5"),
        ("index_params", "M=16", "index_params must be a dictionary such as {'M': 16}, not 'M=16'"),
        ("gate", "3", "gate: k must be a whole number of at least 1, not '3'"),
    ],
)
def test_a_migration(name, value, message):
    with pytest.raises(InvalidParameter) as refused:
        planned(**{name: value})
    assert message in str(refused.value)
    if name == "client_ttl":
        for options in (MigrationOptions, RefreshOptions):
            with pytest.raises(InvalidParameter, match=message):
                options(client_ttl=value)


@pytest.mark.parametrize("body", ["live", None, Copy])
def test_a_body(body):
    with pytest.raises(InvalidParameter, match=r"^body must be a Copy or a Beside, not "):
        plan_correction(None, "products", np.eye(4), body)


def test_numbers_of_numpy_are_numbers():
    with pytest.raises(InvalidInput, match="store"):
        planned(client_ttl=np.float32(1.5), index_params={"M": 16})
    assert MigrationOptions(client_ttl=np.float32(1.5)).client_ttl == 1.5
