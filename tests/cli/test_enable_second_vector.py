"""`enable --where second_vector`, its status and its end, as people see them."""

import json

import numpy as np
import pytest
from milvus_lite.server_manager import server_manager_instance

from milvus_hubness import connect
from tests.support.bias_fields import with_second_field
from tests.support.galleries import vectors

DIM, WIDTH = 8, 16
WHERE = ("--bank", "bank.npy", "--method", "nnn", "--k", "4", "--where", "second_vector")


@pytest.fixture
def photos(files):
    client = connect("shop.db")
    with_second_field(client, "photos", vectors(np.random.default_rng(6), 50, DIM), "COSINE", WIDTH)
    yield
    client.close()
    server_manager_instance.release_server("shop.db")


def test_enable_in_place_plans_then_does_and_disable_says_what_stays(photos, run):
    planned = run("enable", "photos", *WHERE, "--plan")
    assert planned.returncode == 0
    for said in (
        "in place",
        "hubness_vector, 16 wide",
        "not changed",
        "must name one of",
        "without --plan",
    ):
        assert said in planned.stdout
    assert "corrected  no" in run("status", "photos").stdout
    shown = run("enable", "photos", *WHERE, "--client-ttl", "0")
    assert shown.returncode == 0
    assert "50 rows have a bias" in shown.stdout
    assert "second vector field" in run("status", "photos").stdout
    told = json.loads(run("status", "photos", "--json").stdout)["status"]
    assert (told["where"], told["second_vector"], told["pending"]) == (
        "second_vector",
        "hubness_vector",
        0,
    )
    assert "none (bank and parameters" in run("refresh", "photos").stdout
    ended = json.loads(run("disable", "photos", "--json").stdout)["disable"]
    assert (ended["dropped"], ended["stays"]) == (None, "hubness_vector")


def test_a_collection_without_room_is_refused_with_the_version_it_takes(files, run):
    done = run("enable", "products", *WHERE)
    assert done.returncode == 1
    for said in ("hubness_vector", "2.6.18", "milvus_lite"):
        assert said in done.stderr
