"""A prior from the command line: its weight by tune, plans, jobs, status, and one line for what is wrong."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from milvus_hubness import connect
from tests.support.galleries import plain_collection

ITEMS, DIM = 120, 16


@pytest.fixture(scope="module")
def drawn():
    """Items, a neutral bank, and a log of queries in which few items are wanted most."""
    rng = np.random.default_rng(5)
    drift = rng.standard_normal(DIM)
    items = rng.standard_normal((ITEMS, DIM)) + np.outer(rng.gamma(1, 0.3, ITEMS), drift)

    def asking(wanted):
        noise = 1.2 * rng.standard_normal((len(wanted), DIM))
        return (items[wanted] + noise + 0.5 * drift).astype(np.float32)

    demand = 1 / (1.0 + rng.permutation(ITEMS))
    log = rng.choice(ITEMS, 700, p=demand / demand.sum())
    bank = asking(rng.integers(0, ITEMS, 200))
    return items.astype(np.float32), bank, asking(log), log


@pytest.fixture
def shop(files, drawn):
    """The collection `photos` with clicks, a bank, pairs, and a log of clicks."""
    items, bank, queries, log = drawn
    client = connect("shop.db")
    plain_collection(client, "photos", items, "IP")
    clicks = np.bincount(log[500:], minlength=ITEMS)
    client.upsert(
        "photos",
        [
            {"id": i, "vector": items[i], "group": 1, "clicks": int(n), "title": "a"}
            for i, n in enumerate(clicks)
        ],
    )
    np.save("neutral.npy", bank)
    np.savez("pairs.npz", query=queries[:200], key=log[:200])
    np.savez("clicks.npz", query=queries[500:], key=log[500:])
    return client


def test_tune_chooses_the_weight_and_the_jobs_take_it(shop, run):
    tune = ("tune", "photos", "--bank", "neutral.npy", "--prior", "clicks")
    done = run(*tune, "--pairs", "pairs.npz")
    assert done.returncode == 0, done.stderr
    assert "The prior: weight 0." in done.stdout
    assert "with field 'clicks' as a prior of weight 0." in done.stdout.replace("\n", " ")

    plan = json.loads(
        run("migrate", "run", "--plan", "photos", "--bank", "neutral.npy", "--json").stdout
    )
    weight = plan["plan"]["prior"]["weight"]
    assert (plan["plan"]["prior"]["field"], weight > 0) == ("clicks", True)
    shown = run("migrate", "run", "--plan", "photos", "--bank", "neutral.npy").stdout
    assert f"field clicks, weight {weight:g} of the spread of scores" in shown

    run("migrate", "run", "photos", "--bank", "neutral.npy", "--no-writers", "--force")
    status = json.loads(run("status", "photos_hubness", "--json").stdout)["status"]
    assert status["prior"]["weight"] == weight
    assert status["prior"]["factor"] > 0
    words = f"field clicks, weight {weight:g} of the spread of scores, which is"
    assert words in " ".join(run("status", "photos_hubness").stdout.split())

    refresh = ("refresh", "photos_hubness", "--rename")
    changed = run(*refresh, "--prior-from", "clicks.npz", "--prior-weight", "0.2", "--json")
    assert json.loads(changed.stdout)["refresh"]["action"] == "full"
    shown = " ".join(run("status", "photos_hubness").stdout.split())
    assert "clicks, weight 0.2 of the spread of scores" in shown
    assert "(the prior changed" in run(*refresh, "--no-prior").stdout
    assert json.loads(run("status", "photos_hubness", "--json").stdout)["status"]["prior"] is None


def test_clicks_of_qrels_are_those_of_whole_numbers(shop, run, drawn):
    """Keys of a qrels file are texts, and those of the collection are not."""
    *_, log = drawn
    lines = [f"q{query} 0 {key} 1" for query, key in enumerate(log[500:])]
    Path("clicks.qrels").write_text("\n".join([*lines, "q0 0 4711 1"]))
    plan = ("migrate", "run", "--plan", "photos", "--bank", "neutral.npy", "--force", "--json")
    priors = []
    for source in ("clicks.npz", "clicks.qrels"):
        done = run(*plan, "--prior-from", source, "--prior-weight", "0.2")
        assert done.returncode == 0, done.stderr
        priors.append(json.loads(done.stdout)["plan"]["prior"])
    of_rows = len(set(log[500:].tolist()))
    assert [prior.pop("keys") for prior in priors] == [of_rows, of_rows + 1]
    assert priors[0] == priors[1]


def test_clicks_may_have_their_keys_in_a_column_of_any_name(shop, run):
    with np.load("clicks.npz") as file:
        arrays = {("sort" if name == "key" else name): values for name, values in file.items()}
    np.savez("named.npz", **arrays)
    options = ("photos", "--bank", "neutral.npy", "--prior-weight", "0.2")
    named = ("--prior-from", "named.npz", "--key-column", "sort")
    for command in (("migrate", "run", "--plan"), ("enable", "--plan")):
        usual = run(*command, *options, "--prior-from", "clicks.npz", "--force", "--json")
        done = run(*command, *options, *named, "--force", "--json")
        assert done.returncode == 0, done.stderr
        priors = [json.loads(each.stdout)["plan"]["prior"] for each in (usual, done)]
        assert priors[0] == priors[1]
    assert "sort" in run("migrate", "run", "--plan", *options, *named[:2]).stderr
    # The pairs have a usual name: the column is that of the clicks.
    tune = ("tune", "photos", "--bank", "neutral.npy", "--pairs", "pairs.npz", *named)
    assert "as a prior of weight" in run(*tune).stdout.replace("\n", " ")


@pytest.mark.parametrize("suffix", ["npz", "jsonl", "csv"])
def test_clicks_need_neither_vectors_nor_ids_of_queries(shop, run, suffix, drawn):
    """A log of a shop says what was bought, and often nothing else."""
    keys = drawn[3][500:].tolist()
    if suffix == "npz":
        np.savez("log.npz", key=keys)
    else:
        row, first = ('{{"key": {}}}\n', "") if suffix == "jsonl" else ("{}\n", "key\n")
        Path(f"log.{suffix}").write_text(first + "".join(row.format(key) for key in keys))
    named = ("photos", "--bank", "neutral.npy", "--force", "--prior-weight", "0.2", "--plan")
    plans = [
        json.loads(run("enable", *named, "--prior-from", file, "--json").stdout)["plan"]["prior"]
        for file in (f"log.{suffix}", "clicks.npz")
    ]
    assert plans[0] == plans[1]
    done = run("tune", "photos", "--bank", "neutral.npy", "--pairs", f"log.{suffix}")
    assert "has no " in done.stderr, "judgements are about queries"


def test_the_next_command_has_the_clicks_that_were_tried(shop, run):
    """No verdict has them, so that the job would leave the prior out."""
    named = ("--prior-from", "clicks.npz", "--pairs", "pairs.npz")
    tuned = run("tune", "photos", "--bank", "neutral.npy", *named)
    [line] = [line for line in tuned.stdout.splitlines() if line.startswith("Next: ")]
    words = [word.replace("ALIAS", "live") for word in shlex.split(line)[2:]]
    planned = run(*words, "--json")
    assert planned.returncode == 0, planned.stderr
    prior = json.loads(planned.stdout)["plan"]["prior"]
    assert prior["source"] == "pairs"
    assert f"The prior: weight {prior['weight']:g} " in tuned.stdout


def test_a_weight_of_0_that_tune_chose_is_no_lack_of_a_weight(shop, run):
    """The plan proposed to run tune as it had just been run."""
    rng = np.random.default_rng(0)
    rows = shop.query("photos", filter="id >= 0", output_fields=["*"], limit=ITEMS)
    shop.upsert("photos", [{**row, "noise": int(rng.integers(1, 99))} for row in rows])
    tune = ("tune", "photos", "--bank", "neutral.npy", "--prior", "noise")
    assert "The prior: weight 0 of" in run(*tune, "--pairs", "pairs.npz").stdout
    options = ("photos", "--bank", "neutral.npy", "--prior", "noise", "--force", "--plan")
    shown = " ".join(run("migrate", "run", *options).stdout.split())
    assert "tune found 0 the best on the labelled pairs" in shown
    assert "run tune with" not in shown


def test_without_pairs_the_weight_stays_0_and_the_commands_say_so(shop, run):
    done = run("tune", "photos", "--bank", "neutral.npy", "--prior", "clicks")
    assert "The weight of the prior stays 0" in done.stdout
    options = ("photos", "--bank", "neutral.npy", "--prior", "clicks", "--force")
    for command in (("migrate", "run", "--plan"), ("enable",)):
        extra = ("--plan",) if command == ("enable",) else ()
        shown = " ".join(run(*command, *options, *extra).stdout.split())
        assert "no weight for the prior from field 'clicks'" in shown
        assert "run tune with --prior and labelled pairs, or pass --prior-weight" in shown


def test_what_is_wrong_with_a_prior_is_one_line_and_nothing_is_written(shop, run):
    before = shop.list_collections()
    for options, message in {
        ("--prior", "title"): "field 'title' of 'photos' is not a number in 120 rows, such as",
        ("--prior", "sales"): "field 'sales' of 'photos' is 0 or missing in all rows",
        ("--prior", "group"): "field 'group' of 'photos' is the same in all rows",
        ("--prior", "clicks", "--prior-weight", "-1"): "prior_weight is a number from 0 to 10",
        ("--prior-weight", "0.1"): "prior_weight is the weight of a prior: pass prior too",
        ("--prior-from", "neutral.npy"): "neutral.npy",
    }.items():
        for command in (("migrate", "run"), ("enable",)):
            extra = ("--no-writers",) if command[0] == "migrate" else ()
            done = run(*command, "photos", "--bank", "neutral.npy", *options, *extra)
            is_usage = "--prior-weight" in options
            assert done.returncode == (2 if is_usage else 1), (command, options)
            assert message in done.stderr
            assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    done = run("migrate", "run", "photos", "--prior", "a", "--prior-from", "b", "--bank", "c.npy")
    assert (done.returncode, "a prior has one source" in done.stderr) == (2, True)
    assert shop.list_collections() == before
