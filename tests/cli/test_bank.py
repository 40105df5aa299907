"""milvus-hubness bank, as a user runs it."""

import json

import numpy as np

from tests.cli.conftest import assert_fails, collections


def test_a_bank_lives_and_stops(run, files):
    assert (
        run(
            "migrate", "run", "products", "--bank", "bank.npy", "--k", "8", "--no-writers"
        ).returncode
        == 0
    )
    shown = run("bank", "status", "products_hubness")
    assert (shown.returncode, "'products_hubness' is not sampled" in shown.stdout) == (0, True)

    begun = run(
        "bank", "sample", "products_hubness", "--rate", "0.05", "--size", "100", "--half-life", "48"
    )
    assert begun.returncode == 0, begun.stderr
    for fact in (
        "5.000% of live queries",
        "products_hubness__query_samples",
        "40 first queries",
        "48 h",
    ):
        assert fact in begun.stdout
    assert run("bank", "update", "products_hubness", "--seed-share", "0.5").returncode == 0
    [told] = json.loads(run("bank", "status", "products_hubness", "--json").stdout)["samplings"]
    terms = told["sampling"]
    assert (terms["rate"], terms["size"], terms["seed_share"]) == (0.05, 100, 0.5)
    assert (told["seed"], told["live"], told["waiting"]) == (40, 0, 0)

    assert_fails(
        run("bank", "sample", "products_hubness", "--rate", "2"),
        2,
        "rate should be less than or equal to 1, not 2.0",
    )
    assert run("bank", "update", "products_hubness").returncode == 2
    assert "Turned off" in run("bank", "off", "products_hubness").stdout
    assert "is not sampled" in run("bank", "off", "products_hubness").stdout
    assert "products_hubness__query_samples" not in collections(files)


def test_the_help_calls_values_by_their_units(run):
    text = run("bank", "sample", "--help").stdout
    for option in ("--rate SHARE", "--half-life HOURS", "--size N"):
        assert option in text


def test_from_no_queries_at_all_to_a_corrected_copy(run, files):
    """A plain collection is sampled, and its samples are the bank of tune and of a migration."""
    assert_fails(run("bank", "update", "products", "--rate", "0.5"), 1, "is not sampled")
    begun = run("bank", "sample", "products", "--rate", "0.5", "--size", "5000")
    assert begun.returncode == 0, begun.stderr
    assert "0 of at most 5,000" in begun.stdout
    assert_fails(
        run("migrate", "plan", "products", "--bank", "samples"), 1, "no query of 'products' is sam"
    )
    assert "pass --bank FILE" in run("migrate", "plan", "products").stderr

    imported = run("bank", "import", "products", "bank.npy")
    assert "Added 40 queries" in imported.stdout
    shown = run("bank", "status", "products").stdout
    assert "40 of at most 5,000" in shown
    assert "enough to judge on, few for a bank" in shown
    assert "are sampled, pass --bank samples" in run("migrate", "plan", "products").stderr
    assert_fails(run("tune", "products"), 1, "are sampled, pass --bank samples")

    exported = run("bank", "export", "products", "sampled.npz")
    assert "Wrote 40 queries" in exported.stdout
    assert len(np.load(files / "sampled.npz")["queries"]) == 40
    assert_fails(run("bank", "export", "products", "sampled.txt"), 1, ".npy or .npz")

    planned = run("migrate", "plan", "products", "--bank", "samples", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["plan"]["bank"]["queries"] == 40
    assert run("tune", "products", "--bank", "samples").returncode == 0
