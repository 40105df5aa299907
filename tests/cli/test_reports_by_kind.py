"""`tune`, `check`, `hubs` and `status` of a collection with photos and texts, from the command."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milvus_hubness import connect
from tests.cli.conftest import assert_fails
from tests.support.galleries import plain_collection
from tests.support.mixed_kinds import mixed_kinds

PAIRS = ("--bank", "asked.npy", "--pairs", "pairs.parquet")
PAGE = ("--page", "hubness.html")


@pytest.fixture
def shop(files):
    mixed = mixed_kinds(items=300, queries=200, bank=400)
    client = connect("shop.db")
    rows = plain_collection(client, "shop", mixed.items, "COSINE")
    for row, value in zip(rows, mixed.values, strict=True):
        row["modality"] = value or ""
    client.upsert("shop", rows)
    np.save("asked.npy", mixed.bank)
    table = pa.table({"query": list(mixed.queries), "key": mixed.answers.tolist()})
    pq.write_table(table, "pairs.parquet")
    return mixed


def words(done):
    return " ".join(done.stdout.split())


def test_tune_shows_both_sides_and_migrate_follows_the_better_one(shop, run):
    done = run("tune", "shop", *PAIRS, "--kind", "modality")
    assert done.returncode == 0, done.stderr
    text = words(done)
    assert "Without and with the kinds of modality" in text
    assert "with kinds: migrate follows it with --kind modality" in text
    assert "R@1 with kinds differs by +" in text
    assert "rows have no kind" in text

    told = json.loads(run("status", "shop", "--json").stdout)["status"]["verdicts"]
    assert [each["kind"] for each in told] == ["modality"]
    assert "by the kinds of modality: apply" in words(run("status", "shop"))

    plan = ("migrate", "run", "--plan", "shop", "--bank", "asked.npy", "--json")
    by_kind = json.loads(run(*plan, "--kind", "modality").stdout)["plan"]
    assert by_kind["estimator"] == told[0]["choice"]
    without = json.loads(run(*plan).stdout)["plan"]
    assert without["estimator"] != told[0]["choice"]
    assert any("pass --kind modality" in remark for remark in without["remarks"])


def test_the_json_of_tune_has_all_six_searches(shop, run):
    done = run("tune", "shop", *PAIRS, "--kind", "modality", "--json")
    kinds = json.loads(done.stdout)["tune"]["kinds"]
    assert (kinds["source"], kinds["chosen"]) == ("modality", True)
    assert [row["kinds"] for row in kinds["rows"]] == [False] * 3 + [True] * 3
    assert kinds["gain"]["low"] > 0
    without = json.loads(run("tune", "shop", *PAIRS, "--json").stdout)["tune"]
    assert without["kinds"] is None


def test_check_and_explain_compare_by_kind(shop, run, files):
    done = run("check", "shop", *PAIRS, *PAGE, "--kind", "modality", "--json")
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)["check"]["diagnosis"]
    photos = planned["kinds"][0]
    assert photos["shares"]["value"] == "photo"
    assert photos["value_after"] > photos["value_before"] + 0.3
    assert "By kind: modality" in (files / "hubness.html").read_text()

    command = ("--bank", "asked.npy", "--kind", "modality", "--no-writers", "--force")
    copied = run("migrate", "run", "shop", *command)
    assert copied.returncode == 0, copied.stderr
    shown = run("check", "shop_hubness", "--pairs", "pairs.parquet", *PAGE)
    assert "By kind: modality" in words(shown)
    again = run("check", "shop_hubness", "--pairs", "pairs.parquet", *PAGE, "--json")
    [served, *_] = json.loads(again.stdout)["check"]["diagnosis"]["kinds"]
    assert served["value_before"] == photos["value_before"]
    assert served["value_after"] == pytest.approx(photos["value_after"], abs=0.02)
    assert f"{served['value_before']:.1%} -> " in words(shown)

    explained = run("hubs", "shop_hubness", "--query-number", "3")
    assert re.search(r"raw score \+ by kind - [0-9.]+ x bias = corrected score", words(explained))
    told = json.loads(run("hubs", "shop_hubness", "--query-number", "3", "--json").stdout)
    strength = told["hubs"]["query"]["strength"]
    for answer in told["hubs"]["query"]["answers"]:
        total = answer["raw_score"] + answer["by_kind"] - strength * answer["bias"]
        assert total == pytest.approx(answer["corrected_score"], abs=2e-6)


def test_what_is_not_possible_is_refused_in_one_line(shop, run):
    """`note` is different in each row; a network for re-ranking is judged where searches have no kinds."""
    assert_fails(run("tune", "shop", *PAIRS, "--kind", "note"), 1, "more than 16 values")
    assert_fails(run("check", "shop", *PAIRS, "--kind", "absent"), 1, "two kinds")

    command = ("--bank", "asked.npy", "--kind", "modality", "--no-writers", "--force")
    assert run("migrate", "run", "shop", *command).returncode == 0
    refused = run("tune", "shop_hubness", "--pairs", "pairs.parquet", "--kind", "note")
    assert_fails(refused, 1, "more than 16 values")

    small = ("--form", "linear", "--out", "net.safetensors")
    trained = run("quari", "train", "--pairs", "pairs.parquet", "--collection", "shop", *small)
    assert trained.returncode == 0, trained.stderr
    judging = ("quari", "eval", "net.safetensors", "--pairs", "pairs.parquet", "--collection")
    assert_fails(run(*judging, "shop_hubness"), 1, "compare by the kinds of 'modality'")
