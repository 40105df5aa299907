"""Arguments of a plan that cannot be are one line each, before the database is asked for anything."""

import numpy as np
import pytest

from milvus_hubness import InvalidParameter, QueryBank, RefreshOptions
from milvus_hubness.jobs.common.judging import Judging
from milvus_hubness.jobs.common.kinds import KindRequest
from milvus_hubness.jobs.common.priors import PriorRequest
from milvus_hubness.jobs.migration.plan import MigrationOptions, MigrationRequest

UNSET = (
    *("target_bank", "estimator", "gate", "field", "target", "bank_collection", "alias"),
    *("index_type", "index_params"),
)


def request(**changed):
    given = {
        **dict.fromkeys(UNSET),
        "source": "products",
        "bank": QueryBank.of(np.eye(4)),
        "prior": PriorRequest(),
        "kinds": KindRequest.of(None),
        "rename": False,
        "measure": False,
        "restart": False,
        "judging": Judging.of(None, None),
        "client_ttl": 0.0,
        "on_hub": "off",
    }
    return MigrationRequest(**given | changed)


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
        request(**{name: value})
    assert message in str(refused.value)
    if name == "client_ttl":
        for options in (MigrationOptions, RefreshOptions):
            with pytest.raises(InvalidParameter, match=message):
                options(client_ttl=value)


def test_numbers_of_numpy_are_numbers():
    taken = request(client_ttl=np.float32(1.5), index_params={"M": 16})
    assert taken.client_ttl == 1.5
