"""milvus-hubness bank, as a user runs it."""

import json

from tests.cli.conftest import assert_fails, collections


def test_a_bank_lives_and_stops(run, files):
    assert (
        run(
            "migrate", "run", "products", "--bank", "bank.npy", "--k", "8", "--no-writers"
        ).returncode
        == 0
    )
    shown = run("bank", "products_hubness")
    assert (shown.returncode, "'products_hubness' has no online bank" in shown.stdout) == (0, True)

    begun = run("bank", "products_hubness", "--rate", "0.05", "--size", "100", "--half-life", "48")
    assert begun.returncode == 0, begun.stderr
    for fact in (
        "5.000% of live queries",
        "products_hubness__query_samples",
        "40 first queries",
        "48 h",
    ):
        assert fact in begun.stdout
    run("bank", "products_hubness", "--seed-share", "0.5")
    [told] = json.loads(run("bank", "products_hubness", "--json").stdout)["online_banks"]
    terms = told["online_bank"]
    assert (terms["rate"], terms["size"], terms["seed_share"]) == (0.05, 100, 0.5)
    assert (told["seed"], told["live"], told["waiting"]) == (40, 0, 0)

    assert_fails(
        run("bank", "products_hubness", "--rate", "2"),
        2,
        "rate should be less than or equal to 1, not 2.0",
    )
    assert_fails(run("bank", "products", "--rate", "0.1"), 1, "is not corrected")
    assert run("bank", "products_hubness", "--off", "--rate", "0.1").returncode == 2
    assert "Turned off" in run("bank", "products_hubness", "--off").stdout
    assert "has no online bank" in run("bank", "products_hubness", "--off").stdout
    assert "products_hubness__query_samples" not in collections(files)
