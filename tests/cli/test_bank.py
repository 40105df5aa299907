"""milvus-hubness bank, as a user runs it."""

import json
import stat

import numpy as np

from milvus_hubness import MilvusStore, connect
from tests.cli.conftest import DIM, assert_fails, collections
from tests.support.galleries import vectors
from tests.support.samples import put_queries


def test_sampling_starts_serves_a_refresh_and_stops(run, files):
    queries = vectors(np.random.default_rng(7), 60, DIM)
    assert (
        run(
            "migrate", "run", "products", "--bank", "bank.npy", "--param", "k=8", "--no-writers"
        ).returncode
        == 0
    )
    assert "sampled" not in run("status", "products_hubness").stdout

    begun = run("bank", "sample", "products_hubness", "--rate", "0.05", "--size", "100")
    assert begun.returncode == 0, begun.stderr
    for fact in (
        "5.000% of live queries",
        "products_hubness__query_samples_vector",
        "0 of at most",
        "about 20,000 searches until 1,000 are sampled",
    ):
        assert fact in begun.stdout
    assert run("bank", "sample", "products_hubness", "--rate", "0.5").returncode == 0
    told = json.loads(run("status", "products_hubness", "--json").stdout)["status"]
    [told] = told["samplings"]
    settings = told["sampling"]
    assert (settings["rate"], settings["size"], told["samples"]) == (0.5, 100, 0)

    # What is sampled is the bank of a refresh.
    assert_fails(run("refresh", "products_hubness", "--bank", "samples"), 1, "is sampled yet")
    put_queries(MilvusStore(connect("shop.db")), "products_hubness", queries)
    done = run("refresh", "products_hubness", "--bank", "samples", "--force", "--rename", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["refresh"]["action"] == "full"

    assert_fails(
        run("bank", "sample", "products_hubness", "--rate", "2"),
        2,
        "rate should be less than or equal to 1, not 2.0",
    )
    both = run("bank", "sample", "--off", "products_hubness", "--rate", "0.5")
    assert (both.returncode, "--off takes neither --rate nor --size" in both.stderr) == (2, True)
    assert "Turned off" in run("bank", "sample", "--off", "products_hubness").stdout
    assert "is not sampled" in run("bank", "sample", "--off", "products_hubness").stdout
    assert "products_hubness_r2__query_samples_vector" not in collections(files)


def test_what_is_sampled_is_listed_before_it_goes_and_can_stay(run, files):
    client = connect("shop.db")
    assert (
        run("enable", "products", "--bank", "bank.npy", "--param", "k=8", "--force").returncode == 0
    )
    assert run("bank", "sample", "products").returncode == 0
    put_queries(MilvusStore(client), "products", np.load("bank.npy"))
    made = ("migrate", "run", "products", "--bank", "bank.npy", "--param", "k=8", "--alias", "live")
    assert run(*made, "--no-writers", "--force").returncode == 0
    put_queries(MilvusStore(client), "products_hubness", np.load("bank.npy")[:7])

    stored = "products__query_samples_vector"
    clean = ("migrate", "clean", "live", "--drop", "products")
    preview = run(*clean)
    assert f"{stored}, 40 queries" in preview.stdout
    sides = "products__bias_a, products__bias_b"
    assert sides in preview.stdout
    assert "stay with --keep-samples" in preview.stdout
    assert "query samples" not in run(*clean, "--keep-samples").stdout
    cleaned = run(*clean, "--keep-samples", "--yes", "--json")
    assert json.loads(cleaned.stdout)["clean"]["dropped"] == {
        "the source": "products, 60 rows",
        "side collections": sides,
    }
    assert not collections(files) & {"products", *sides.split(", ")}
    kept = ("tune", "products_hubness", "--bank", f"collection:{stored}", "--json")
    assert json.loads(run(*kept).stdout)["tune"]["bank_size"] == 40


def test_the_help_calls_values_by_their_units(run):
    text = run("bank", "sample", "--help").stdout
    for option in ("--rate SHARE", "--size N"):
        assert option in text


def test_from_no_queries_at_all_to_a_corrected_copy(run, files):
    """A plain collection is sampled, and its samples are the bank of tune and of a migration."""
    begun = run("bank", "sample", "products", "--rate", "0.5", "--size", "5000")
    assert begun.returncode == 0, begun.stderr
    assert "0 of at most 5,000" in begun.stdout
    assert_fails(
        run("migrate", "run", "--plan", "products", "--bank", "samples"),
        1,
        "no query of 'products' is sam",
    )
    assert "pass --bank FILE" in run("migrate", "run", "--plan", "products").stderr

    put_queries(MilvusStore(connect("shop.db")), "products", np.load("bank.npy"))
    shown = run("status", "products").stdout
    assert "40 of at most 5,000" in shown
    assert "enough to judge on, few for a bank" in shown
    assert "are sampled, pass --bank samples" in run("migrate", "run", "--plan", "products").stderr
    assert_fails(run("tune", "products"), 1, "are sampled, pass --bank samples")

    exported = run("bank", "export", "products", "sampled.npz")
    assert "Wrote 40 queries" in exported.stdout
    assert stat.S_IMODE((files / "sampled.npz").stat().st_mode) == 0o600
    assert len(np.load(files / "sampled.npz")["queries"]) == 40
    assert_fails(run("bank", "export", "products", "sampled.txt"), 1, ".npy or .npz")

    planned = run("migrate", "run", "--plan", "products", "--bank", "samples", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["plan"]["bank"]["queries"] == 40
    assert run("tune", "products", "--bank", "samples").returncode == 0
