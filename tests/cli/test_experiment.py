"""milvus-hubness experiment, and pairs that users gave, as a user runs them."""

import json

import numpy as np

from milvus_hubness import Experiment, HubnessClient
from tests.cli.conftest import assert_fails


def test_a_test_on_live_traffic_from_the_first_search_to_the_page(run, files):
    done = run("migrate", "run", "products", "--bank", "bank.npy", "--k", "8", "--no-writers")
    assert done.returncode == 0, done.stderr
    assert_fails(run("experiment", "report", "products_hubness"), 1, "no outcomes", "--outcomes 1")
    assert run("bank", "sample", "products_hubness", "--outcomes", "1").returncode == 0
    assert_fails(run("experiment", "report", "products_hubness"), 1, "no answer of an experiment")

    client = HubnessClient("shop.db", experiment=Experiment("november"))
    dim = np.load("bank.npy").shape[1]
    for query in np.random.default_rng(9).standard_normal((40, dim), np.float32):
        answer = client.search("products_hubness", [query], limit=5)
        client.feedback(answer, answer[0][0].id)
    client.close()

    shown = run("experiment", "report", "products_hubness", "--output", "experiment.html")
    assert shown.returncode == 0, shown.stderr
    assert "Experiment november of products_hubness" in shown.stdout
    assert "no difference proven yet" in shown.stdout
    assert "no difference proven yet" in (files / "experiment.html").read_text("utf-8")
    told = json.loads(run("experiment", "report", "products_hubness", "--json").stdout)
    assert told["experiment"] == "november"
    assert told["report"]["control"]["queries"] + told["report"]["treatment"]["queries"] == 40
    assert "november" in run("experiment", "list", "products_hubness").stdout
    assert_fails(
        run("experiment", "report", "products_hubness", "--name", "other"), 1, "choose one of nov"
    )
    assert "40 answers, 40 outcomes" in run("bank", "status", "products_hubness").stdout

    tuned = run("tune", "products_hubness", "--pairs", "outcomes", "--json")
    assert tuned.returncode == 0, tuned.stderr
    assert json.loads(tuned.stdout)["tune"]["labelled"]
    planned = run("migrate", "plan", "products", "--bank", "bank.npy", "--prior-from", "outcomes")
    assert_fails(planned, 1, "no outcomes of 'products' are recorded")
