"""A bias location has one word: in the API, in statuses and on the pages. Nothing chooses it: each database has one."""

import inspect
import json
import re
from typing import get_args

import numpy as np
import pytest
from typer.testing import CliRunner

from milvus_hubness import (
    NNN,
    Beside,
    QueryBank,
    Recipe,
    StateError,
    enable,
    migrate,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.basics.defaults import BiasLocation
from milvus_hubness.cli import app
from milvus_hubness.correction.codec.base import VectorCodec
from milvus_hubness.correction.codec.beside import BesideCodec
from milvus_hubness.errors import HubnessError
from tests.docs import pages
from tests.support.galleries import plain_collection, vectors

LOCATIONS = ("vector", "beside")
DIM = 8
BANK = QueryBank(vectors(np.random.default_rng(3), 30, DIM))


def test_the_words_are_those_of_the_glossary_and_of_the_codecs():
    assert get_args(BiasLocation) == LOCATIONS
    codecs = (VectorCodec, BesideCodec)
    assert tuple(codec.location for codec in codecs) == ("vector", "beside")
    [row] = re.findall(
        r"^\| bias location \|(.*)\|$", (pages.DOCS / "reference/glossary.md").read_text(), re.M
    )
    assert tuple(re.findall(r"`(\w+)`", row)) == LOCATIONS


def filled(database):
    name = database.name("located")
    database.made += [f"{name}__bias_a", f"{name}__bias_b"]
    items = vectors(np.random.default_rng(4), 30, DIM)
    plain_collection(database.client(), name, items, "COSINE")
    return database.store(), name


@pytest.mark.parametrize("location", LOCATIONS)
def test_status_and_stored_state_tell_them_apart(shared_lite, location):
    store, name = filled(shared_lite)
    if location == "vector":
        plan = plan_correction(store, name, Recipe(BANK, estimator=NNN(4)))
        name = migrate(store, plan, no_writers=True).target
        shared_lite.made.append(name)
    else:
        enable(
            store,
            plan_correction(store, name, Recipe(BANK, estimator=NNN(4)), Beside()),
            client_ttl=0.0,
        )

    shown = status(store, name).to_dict()
    assert shown["where"] == location
    assert bool(shown["side_collection"]) == (location == "beside")
    stored = json.loads(shared_lite.client().describe_collection(name)["properties"]["hubness"])
    assert bool(stored.get("reranking")) == (location == "beside")


def test_nothing_chooses_the_place():
    assert "where" not in inspect.signature(plan_correction).parameters
    assert "--where" not in CliRunner().invoke(app, ["enable", "--help-all"]).output


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name_of)
def test_no_page_has_a_choice(page):
    assert not re.findall(r"--where\b|where=\"", page.read_text())


def test_the_table_of_locations_names_each():
    text = (pages.DOCS / "concepts/augmented-vectors.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", text, re.M)) == LOCATIONS


@pytest.mark.parametrize("call", ["search", "upsert", "refresh"])
def test_milvus_refuses_a_state_with_biases_in_payloads(lite, call):
    """Such a state is Qdrant's: no search is silently uncorrected, and no row gets keys of biases."""
    store, name = filled(lite)
    enable(
        store,
        plan_correction(store, name, Recipe(BANK, estimator=NNN(4)), Beside()),
        client_ttl=0.0,
    )
    client = lite.hubness_client()
    state = store.info(name).state
    reranking = state.reranking.model_copy(update={"side_prefix": None})
    foreign = state.model_copy(update={"reranking": reranking})
    store.write_property(name, state.property_name, foreign)
    before = lite.client().query(name, filter="id >= 0", output_fields=["*"])
    row = {"id": 1, "vector": BANK.vectors[0], "group": 1}
    calls = {
        "search": lambda: client.search(name, data=[BANK.vectors[0]]),
        "upsert": lambda: client.upsert(name, [row]),
        "refresh": lambda: refresh(store, name, force=True),
    }
    with pytest.raises(HubnessError, match="names no side collection") as refused:
        calls[call]()
    assert isinstance(refused.value, StateError) or isinstance(refused.value.__cause__, StateError)
    assert lite.client().query(name, filter="id >= 0", output_fields=["*"]) == before
