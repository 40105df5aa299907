"""A bias location has one word: in the API, on the command line, in the stored state and on the pages."""

import json
import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from typer.testing import CliRunner

from milvus_hubness import NNN, QueryBank, enable, migrate, plan_enable, plan_migration, status
from milvus_hubness.basics.defaults import BiasLocation, LocationWithoutCopy
from milvus_hubness.cli import app
from milvus_hubness.correction.codec.base import VectorCodec
from milvus_hubness.correction.codec.fields import FieldsCodec, SideCollectionCodec
from tests.docs import pages
from tests.support.bias_fields import with_bias_fields
from tests.support.galleries import plain_collection, vectors

LOCATIONS = ("vector", "fields", "side_collection")
DIM = 8
ROOT = Path(__file__).parents[1]
BANK = QueryBank(vectors(np.random.default_rng(3), 30, DIM))
OTHER_WORDS = r"vectors|side|copy|in_place"
OPTION = re.compile(rf"(--where[ =]|where=\")({OTHER_WORDS})\b")
"""Another word as the value of the option or of the parameter."""


def test_the_words_are_those_of_the_glossary_and_of_the_codecs():
    assert get_args(BiasLocation) == LOCATIONS
    assert get_args(LocationWithoutCopy) == LOCATIONS[1:]
    codecs = (VectorCodec, FieldsCodec, SideCollectionCodec)
    assert tuple(codec.location for codec in codecs) == LOCATIONS
    [row] = re.findall(
        r"^\| bias location \|(.*)\|$", (pages.DOCS / "reference/glossary.md").read_text(), re.M
    )
    assert tuple(re.findall(r"`(\w+)`", row)) == LOCATIONS


@pytest.mark.parametrize("location", LOCATIONS)
def test_plan_status_and_stored_state_name_it_alike(shared_lite, location):
    store, name = shared_lite.store(), shared_lite.name("located")
    shared_lite.made.append(f"{name}__bias")
    items = vectors(np.random.default_rng(4), 30, DIM)
    create = with_bias_fields if location == "fields" else plain_collection
    create(shared_lite.client(), name, items, "COSINE")
    if location == "vector":
        name = migrate(
            store, plan_migration(store, name, BANK, estimator=NNN(4)), no_writers=True
        ).target
        shared_lite.made.append(name)
    else:
        plan = plan_enable(store, name, BANK, estimator=NNN(4), where=location)
        assert plan.to_dict()["where"] == location
        enable(store, plan, client_ttl=0.0)

    shown = status(store, name).to_dict()
    assert shown["where"] == location
    assert bool(shown["side_collection"]) == (location == "side_collection")

    stored = json.loads(shared_lite.client().describe_collection(name)["properties"]["hubness"])
    reranking = stored.get("reranking") or {}
    assert bool(reranking) == (location in ("fields", "side_collection"))
    assert bool(reranking.get("side_collection")) == (location == "side_collection")


def test_the_command_line_offers_the_words_of_the_api():
    shown = CliRunner().invoke(app, ["enable", "--help"]).output
    choices = re.search(r"--where <(.*?)>", shown)[1]
    assert tuple(choices.split("|")) == ("auto", *get_args(LocationWithoutCopy))


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name_of)
def test_a_page_uses_no_other_word(page):
    assert [match[0] for match in OPTION.finditer(page.read_text())] == []


@pytest.mark.parametrize("page", ["how-to/enable", "concepts/augmented-vectors"])
def test_the_tables_of_locations_name_each(page):
    rows = re.findall(r"^\| `(\w+)` \|", (pages.DOCS / f"{page}.md").read_text(), re.M)
    assert set(LOCATIONS[1:]) <= set(rows) <= {*LOCATIONS, "auto"}


def test_the_code_uses_no_other_word():
    files = [
        *ROOT.glob("milvus_hubness/**/*.py"),
        *ROOT.glob("integrations/*/*_hubness/**/*.py"),
        *ROOT.glob("benchmarks/*.py"),
        *ROOT.glob("examples/*.py"),
        *ROOT.glob("tests/**/*.py"),
    ]
    uses = {
        path.relative_to(ROOT).as_posix(): match[0]
        for path in files
        for match in OPTION.finditer(path.read_text("utf-8"))
    }
    assert uses == {}
