"""Arguments of a plan that cannot be are one line each, before the database is asked for anything."""

import numpy as np
import pandas as pd
import pytest

from milvus_hubness import (
    Beside,
    Copy,
    Detail,
    InvalidInput,
    InvalidParameter,
    MilvusStore,
    Recipe,
    RefreshOptions,
    diagnose,
    enable,
    migrate,
    plan_correction,
    refresh,
    tune,
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
    assert Beside(np.float32(0.25)).max_miss_rate == 0.25
    assert Recipe(np.eye(4), prior="clicks", prior_weight=np.float32(0.5)).prior_weight == 0.5
    assert RefreshOptions(keep_former=np.int64(2)).keep_former == 2


@pytest.mark.parametrize("share", ["0.1", None, True, float("nan"), 0, 1])
def test_a_miss_rate(share):
    with pytest.raises(InvalidParameter, match="max_miss_rate must be between 0 and 1, not "):
        Beside(share)


@pytest.mark.parametrize("prior", [np.ones(4), pd.Series({1: 2.0, 2: 3.0}), [1, 2]])
def test_a_prior_of_another_form(prior):
    with pytest.raises(InvalidInput, match="a prior is the name of a field, or clicks by key"):
        Recipe(np.eye(4), prior=prior)


@pytest.mark.parametrize("judgements", ["pairs.npz", {"q": {1: 1}}, 3])
def test_judgements_of_another_form(judgements):
    message = r"^judgements must be of Judgements, not \w+: make them by Judgements.load"
    with pytest.raises(InvalidParameter, match=message):
        RefreshOptions(judgements=judgements)
    store = UnreachableStore()
    for report in (tune, diagnose):
        with pytest.raises(InvalidParameter, match=message):
            report(store, "products", judgements=judgements)


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        (3, "detail must be of Detail, not int"),
        (Detail(runs="raw.trec"), "runs must be of RunFiles"),
    ],
)
def test_details_of_another_form(detail, said):
    with pytest.raises(InvalidParameter, match=said):
        diagnose(UnreachableStore(), "products", np.eye(4), detail=detail)


class UnreachableStore(MilvusStore):
    """A store without a database: a use of it fails."""

    def __init__(self):
        pass


@pytest.mark.parametrize("plan", [None, {}, "products", Copy()])
def test_a_plan_of_another_form(plan):
    for job in (migrate, enable):
        with pytest.raises(
            InvalidParameter, match=r"^plan must be of Plan, not \w+: pass what plan_"
        ):
            job(UnreachableStore(), plan)


def test_options_of_another_form():
    with pytest.raises(InvalidParameter, match="options must be of RefreshOptions, not Recipe"):
        refresh(UnreachableStore(), "products", None, Recipe(np.eye(4)))
    with pytest.raises(InvalidParameter, match="options must be of RefreshOptions, not Migration"):
        refresh(UnreachableStore(), "products", options=MigrationOptions())
