"""The hub guard from the command line: migrate --on-hub, hubs --suspicious and --on-hub."""

import json

import numpy as np
import pytest

from milvus_hubness import HubnessClient, HubRefused, connect
from tests.support.planted import centroid, gallery, genuine

ITEMS, BANK, USERS = gallery()
HUBS = centroid(USERS, 5)


@pytest.fixture
def shop(files, run):
    """A migrated collection `goods` that refuses hubs, in the file of `files`."""
    client = connect("shop.db")
    client.create_collection(
        "goods", dimension=ITEMS.shape[1], metric_type="COSINE", consistency_level="Strong"
    )
    client.insert("goods", rows_of(ITEMS, 0))
    np.save("queries.npy", BANK)
    done = run(
        *("migrate", "run", "goods", "--bank", "queries.npy", "--method", "blend", "--force"),
        *("--alias", "live", "--no-writers", "--on-hub", "refuse", "--json"),
    )
    assert done.returncode == 0, done.stderr
    return client


def rows_of(items, first):
    return [{"id": first + i, "vector": item} for i, item in enumerate(items)]


def test_a_row_that_was_refused_and_written_all_the_same_is_found_by_the_scan(shop, run):
    client = HubnessClient("shop.db")
    with pytest.raises(HubRefused):
        client.insert("live", rows_of(HUBS, 9000) + rows_of(genuine(10), 5000))
    client.insert("live", rows_of(genuine(10), 5000))

    clean = run("hubs", "live", "--suspicious", "--json")
    assert clean.returncode == 0, clean.stderr
    report = json.loads(clean.stdout)["suspicious"]
    assert (report["rows"], report["suspicious"]) == (410, 0)

    assert run("hubs", "live", "--on-hub", "off").returncode == 0
    HubnessClient("shop.db").insert("live", rows_of(HUBS[:2], 9000))
    found = run("hubs", "live", "--suspicious", "--json")
    assert found.returncode == 1
    report = json.loads(found.stdout)["suspicious"]
    assert report["above_budget"] is True
    assert {row["key"] for row in report["listed"] if row["suspicion"] > 1} == {9000, 9001}
    first = report["listed"][0]
    assert first["reach"] > 0.5
    assert first["scope"] == "universal"
    assert first["bias_quantile"] > 0.99

    generous = run("hubs", "live", "--suspicious", "--alert-budget", "0.01")
    assert generous.returncode == 0
    assert "universal" in generous.stdout, generous.stdout


def test_the_guard_is_changed_by_the_command(shop, run):
    done = run("hubs", "live", "--on-hub", "off", "--json")
    assert json.loads(done.stdout)["guard"]["on_hub"] == "off"
    HubnessClient("shop.db").insert("live", rows_of(HUBS, 9000))
    assert run("hubs", "live", "--suspicious").returncode == 1


def test_a_collection_that_is_not_corrected_is_scanned_with_a_bank(shop, run):
    shop.insert("goods", rows_of(HUBS[:3], 9000))
    done = run("hubs", "goods", "--suspicious", "--bank", "queries.npy", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)["suspicious"]
    assert {row["key"] for row in report["listed"] if row["suspicion"] > 1} == {9000, 9001, 9002}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--suspicious", "--on-hub", "warn"), 2, "not both"),
        (("--suspicious", "--row", "7"), 2, "not both"),
        (("--suspicious", "--alert-budget", "2"), 2, "alert_budget is a share from 0 to 1"),
        (("--suspicious",), 1, "too few to see which are hubs"),
    ],
)
def test_mistakes_get_one_line(files, run, arguments, code, said):
    done = run("hubs", "products", "--bank", "bank.npy", *arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
