"""milvus-hubness check: what a new user types first, and what it prints, on files and on a collection."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from milvus_hubness import Judgements, MilvusStore, StoreError, check, connect, diagnose, tune
from tests.cli.conftest import assert_fails
from tests.support.galleries import hubby_gallery, plain_collection, vectors

ITEMS, QUERIES, ANSWERS = hubby_gallery()


def denied(store, collection, name, record):
    raise StoreError("PrivilegeCreateCollection: permission deny to reader")


@pytest.fixture
def shop(files, monkeypatch):
    """The collection `photos`, the same items as a file, past queries, and pairs."""
    monkeypatch.delenv("MILVUS_HUBNESS_VERDICT")
    client = connect("shop.db")
    plain_collection(client, "photos", ITEMS, "IP")
    np.save("items.npy", ITEMS)
    np.save("past.npy", QUERIES[:400])
    np.savez("pairs.npz", queries=QUERIES[400:], label=ANSWERS[400:])
    np.save("photos.npy", ITEMS[:300])
    return client


def test_two_files_give_a_verdict_and_a_page(shop, run):
    words = ("check", "--items", "items.npy", "--queries", "past.npy", "--metric", "IP")
    done = run(*words)
    assert "--page hubness.html writes a page" in done.stdout.splitlines()[-1]
    assert not Path("hubness.html").exists()
    done = run(*words, "--page", "hubness.html")
    assert done.returncode == 0
    first, second, *_ = done.stdout.splitlines()
    assert first == "items.npy: apply"
    assert second.startswith("Expect about +")
    assert (
        "Next: milvus-hubness migrate run COLLECTION --bank past.npy --alias ALIAS --plan --uri URI"
        in (done.stdout)
    )
    assert "ALIAS is the name by which the application searches" in done.stdout
    assert "hubness.html" in done.stdout
    assert Path("hubness.html").read_text().startswith("<!DOCTYPE html>")


def test_after_a_refusal_the_next_command_names_the_files_and_runs(shop, run):
    np.save("foreign.npy", np.ascontiguousarray(QUERIES[:400, ::-1]))
    files = ("--items", "items.npy", "--metric", "IP")
    done = run("check", *files, "--queries", "foreign.npy")
    assert done.returncode == 3
    lines = done.stdout.splitlines()
    assert lines[0] == "items.npy: leave it alone"
    assert lines[1].endswith("embedded by its model.")
    [line] = [line for line in lines if line.startswith("Next: ")]
    words = f"check {' '.join(files)} --queries foreign.npy --pairs PAIRS.npz"
    assert line == f"Next: milvus-hubness {words}"
    assert run(*words.replace("PAIRS", "pairs").split()).returncode in (0, 3)


def test_a_collection_and_its_next_command(shop, run):
    """The verdict on a collection is stored, so that the next command, as it is printed, follows it.

    Its names are those that were typed, and those that the collection has.
    """
    shop.create_alias("photos", "photo_search")
    done = run("check", "photo_search", "--bank", "past.npy", "--page", "photos.html")
    assert done.returncode == 0
    [line] = [line for line in done.stdout.splitlines() if line.startswith("Next: ")]
    words = "run photo_search --bank past.npy --alias photo_search --plan"
    assert line == f"Next: milvus-hubness migrate {words}"
    planned = run(*line.split()[2:], "--json")
    assert planned.returncode == 0
    verdict = json.loads(planned.stdout)["plan"]["verdict"]
    assert verdict["verdict"] == "apply"
    assert verdict["choice"] is not None, "that of check, which tries methods"


def test_figures_of_very_unequal_weights_are_numbers(shop, run):
    """A log may count pieces, seconds or bytes."""
    for largest in (1e20, 1e200):
        weights = np.where(np.arange(len(ANSWERS[400:])) % 2, largest, 1)
        np.savez("weighed.npz", query=QUERIES[400:], label=ANSWERS[400:], weight=weights)
        done = run("check", "photos", "--bank", "past.npy", "--pairs", "weighed.npz")
        if largest == 1e20:
            assert done.returncode in (0, 3), done.stderr
            assert "nan" not in done.stdout
        else:
            assert_fails(done, 1, "the weight of pair 1, 3, 5", "from 0 to 1e+20")


@pytest.mark.parametrize("keyless", [None, True, [3]], ids=str)
def test_an_item_without_a_key_is_one_line(shop, run, keyless):
    rows = [{"vector": item.tolist(), "id": number} for number, item in enumerate(ITEMS[:60])]
    rows[2]["id"] = keyless
    Path("items.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for pairs in ((), ("--pairs", "pairs.npz")):
        done = run("check", "--items", "items.jsonl", "--queries", "past.npy", *pairs)
        assert_fails(done, 1, "'id' of items.jsonl must hold", repr(keyless), "line 3")


def test_right_rows_need_a_key_of_each_item(shop, run):
    """Only one of several items with a key counted as right, so that the figures were too low."""
    np.savez("items.npz", vector=ITEMS, product_id=np.arange(len(ITEMS)) // 2)
    words = ("check", "--items", "items.npz", "--queries", "past.npy", "--metric", "IP")
    done = run(*words, "--pairs", "pairs.npz")
    assert_fails(done, 1, "items.npz has several items with the key 0, 1, 2", "--key-column")
    assert run(*words).returncode == 0, "without right rows, no key is looked up"


def next_words(done):
    """The words of the next command, as it is printed."""
    [line] = [line for line in done.stdout.splitlines() if line.startswith("Next: ")]
    return shlex.split(line)[2:]


@pytest.mark.parametrize("command", ["check", "tune"])
def test_the_next_command_names_the_reference_items_that_the_method_needs(shop, run, command):
    named = ("photos", "--bank", "past.npy", "--target-bank", "photos.npy")
    done = run(command, *named, "--pairs", "pairs.npz")
    words = next_words(done)
    assert "--target-bank" in words
    planned = run(*(word.replace("ALIAS", "live") for word in words), "--json")
    assert planned.returncode == 0, planned.stderr


def test_the_next_command_finds_the_database_of_this_one(shop, run, files):
    """By its address, where the environment has another one."""
    database = ("--uri", "shop.db")
    done = run("check", "photos", "--bank", "past.npy", *database, uri="elsewhere.db")
    words = next_words(done)
    assert " ".join(words).endswith("--uri shop.db")
    assert run(*words, uri="elsewhere.db").returncode == 0


def test_the_next_check_of_files_has_the_same_keys(shop, run):
    np.save("foreign.npy", np.ascontiguousarray(QUERIES[:400, ::-1]))
    keys = [f"photo {number}" for number in range(len(ITEMS))]
    np.savez("items.npz", vector=ITEMS, id=np.arange(len(ITEMS)), name=keys)
    np.savez("PAIRS.npz", query=QUERIES[400:], name=np.array(keys)[ANSWERS[400:]])
    files = ("--items", "items.npz", "--metric", "IP", "--key-column", "name")
    words = next_words(run("check", *files, "--queries", "foreign.npy"))
    done = run(*words)
    assert done.returncode in (0, 3), done.stderr
    assert "labelled queries" in done.stdout


@pytest.mark.parametrize("options", [("check",), ("tune", "--json")], ids=" ".join)
def test_who_may_not_store_the_verdict_sees_it_all_the_same(shop, run, monkeypatch, options):
    """In one line beside the whole result, whose exit status the command has."""
    monkeypatch.setattr(MilvusStore, "write_property", denied)
    done = run(*options, "photos", "--bank", "past.npy")
    assert done.returncode == 0
    if "--json" in options:
        assert json.loads(done.stdout)["tune"]["verdict"] == "apply"
    else:
        assert "photos: apply" in done.stdout
        assert "The hubs, and what correction does about them" in done.stdout.splitlines()[-1]
    # On a slow machine, a line for each step comes first.
    *_, line = done.stderr.splitlines()
    assert "could not be stored in 'photos'" in line
    assert "PrivilegeCreateCollection" in line


def test_a_notebook_that_may_not_store_the_verdict_gets_it(shop, monkeypatch, caplog):
    monkeypatch.setattr(MilvusStore, "write_property", denied)
    store = MilvusStore(shop)
    assert check(store, "photos", QUERIES[:400]).verdict == "apply"
    assert tune(store, "photos", QUERIES[:400]).verdict == "apply"
    assert caplog.text.count("could not be stored in 'photos'") == 2


def test_the_table_has_five_rows_and_all_has_the_rest(shop, run):
    words = ("check", "photos", "--bank", "past.npy", "--pairs", "pairs.npz")
    few, every = run(*words), run(*words, "--all")
    count = json.loads(run(*words, "--json").stdout)["check"]["tuning"]["rows"]
    assert "By chance, excess answers are " in few.stdout
    table = few.stdout.split("(--all shows all)")[1].split("Why:")[0]
    assert len([line for line in table.splitlines() if line.strip()]) == 1 + 5
    assert few.stdout.count(" as it is ") == 1
    assert f"All {len(count) - 1} trials" in every.stdout
    assert len(every.stdout.splitlines()) > len(few.stdout.splitlines()) + len(count) - 10
    assert "two halves of the dimensions agree on the neighbours" not in few.stdout
    assert "two halves of the dimensions agree on the neighbours" in every.stdout


def test_queries_that_are_rows(files, run):
    """As in ArguAna: each row asks for the one that is nearest to it, and finds itself first."""
    items = vectors(np.random.default_rng(3), 250, 12)
    nearest = np.argsort(-(items @ items.T) + 1e3 * np.eye(250), 1)[:, 0]
    np.savez("items.npz", vector=items, id=np.arange(250))
    np.savez("near.npz", query=items[:60], key=nearest[:60], query_id=np.arange(60))
    np.save("past.npy", items[60:160])
    words = ("check", "--items", "items.npz", "--queries", "past.npy", "--metric", "IP")
    near = ("--pairs", "near.npz", "--ignore-identical")
    done = run(*words, *near, "--page", "page.html", "--json")
    checked = json.loads(done.stdout)["check"]
    assert "items as queries" not in [fault["name"] for fault in checked["faults"]]
    assert checked["diagnosis"]["value_before"] == 1.0
    refused = run(*words, "--ignore-identical")
    assert (refused.returncode, "pass --pairs" in refused.stderr) == (2, True)


def test_data_faults_come_first_and_end_with_3(shop, run):
    done = run("check", "--items", "items.npy", "--queries", "photos.npy", "--pairs", "pairs.npz")
    assert done.returncode == 3
    assert done.stdout.splitlines()[0] == "First: the data"
    assert "300 of the 300 vectors of the bank are those of items" in done.stdout
    assert "Next: remedy the data as the first lines say, then check again." in done.stdout
    told = json.loads(
        run("check", "photos", "--bank", "photos.npy", "--page", "p.html", "--json").stdout
    )["check"]
    assert told["faults"][0]["name"] == "items as queries"
    assert (told["verdict"], told["page"]) == ("leave it alone", "p.html")


def test_a_stored_verdict_of_labels_stays(shop, run):
    words = ("check", "photos", "--bank", "past.npy")
    labelled = json.loads(run(*words, "--pairs", "pairs.npz", "--json").stdout)["check"]
    alone = run(*words)
    said = f"follow the stored verdict on this bank: '{labelled['verdict']}', "
    assert said in " ".join(alone.stdout.split())

    def judged_by():
        [stored] = json.loads(run("status", "photos", "--json").stdout)["status"]["verdicts"]
        return stored["judged_by"]

    assert judged_by() == "labelled queries"
    kept = run("tune", "photos", "--bank", "past.npy")
    assert said in " ".join(kept.stdout.split())
    assert judged_by() == "labelled queries"
    replaced = run("tune", "photos", "--bank", "past.npy", "--replace")
    assert "this replaces the stored verdict on this bank: 'apply', " in replaced.stdout
    assert judged_by().startswith("half of the bank")


def test_a_corrected_collection_shows_its_own_biases(shop, run):
    assert run("enable", "photos", "--bank", "past.npy").returncode == 0
    done = run("check", "photos", "--pairs", "pairs.npz", "--page", "page.html", "--json")
    told = json.loads(done.stdout)["check"]
    assert told["next"] == "milvus-hubness refresh photos"
    judgements = Judgements.load("pairs.npz")
    after = diagnose(MilvusStore(shop), "photos", judgements=judgements).to_dict()["after"]
    assert told["diagnosis"]["after"] == after


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("check", "nothing to check: give a COLLECTION or --items FILE"),
        ("check photos --items items.npy", "give a COLLECTION or --items FILE: one of them"),
        ("check --items items.npy", "no past queries: pass --queries FILE"),
        ("check --items items.npy --queries past.npy --field v", "are those of a collection"),
        ("check photos --bank past.npy --queries past.npy --pairs pairs.npz", "not both"),
        ("check --items items.npy --queries past.npy --page past.npy", "--page"),
    ],
)
def test_wrong_usage_is_one_line(shop, run, words, message):
    done = run(*words.split())
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "check --items items.npy --queries pairs.npz --pairs past.npy",
            "past.npy: has vectors alone, and judgements have the keys of right rows too: did you "
            "swap --bank and --pairs?",
        ),
        ("check photos", "'photos' is not corrected and has no bank: pass --bank FILE"),
        ("check --items missing.npy --queries past.npy", "missing.npy: no such file"),
        ("check --items items.npy --queries past.npy --metric DOT", "DOT"),
    ],
)
def test_what_cannot_be_checked_is_one_line(shop, run, words, message):
    assert_fails(run(*words.split()), 2 if "DOT" in words else 1, message)


def test_files_of_two_formats_without_hubs(files, run, monkeypatch):
    """200 pairs cannot tell the gain from 0."""
    monkeypatch.delenv("MILVUS_HUBNESS_VERDICT")
    rng = np.random.default_rng(0)
    items, right = rng.standard_normal((400, 24)), rng.integers(0, 400, 600)
    queries = items[right] + rng.standard_normal((600, 24))
    np.save("items.npy", items.astype(np.float32))
    np.save("past.npy", queries[200:].astype(np.float32))
    with open("pairs.jsonl", "w") as lines:
        for vector, item in zip(queries[:200].tolist(), right[:200].tolist(), strict=True):
            lines.write(json.dumps({"embedding": vector, "id": item}) + "\n")

    done = run("check", "--items", "items.npy", "--queries", "past.npy", "--pairs", "pairs.jsonl")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "items.npy: not proven"
    assert "200 pairs cannot tell it from 0, about " in lines[1]
    assert "tune's mix of " in lines[2]


def test_without_a_database_messages_speak_of_the_files(shop, run):
    broken = ITEMS.copy()
    broken[3, 2] = np.nan
    np.save("broken.npy", broken)
    np.save("short.npy", QUERIES[:, :20])
    np.savez("short.npz", query=QUERIES[:, :20], key=ANSWERS)
    done = run("check", "--items", "broken.npy", "--queries", "past.npy")
    assert_fails(
        done, 1, "the file broken.npy has NaN, infinity or a number beyond float32: remove row 3"
    )
    files = ("check", "--items", "items.npy", "--queries")
    for words in ((*files, "short.npy"), (*files, "past.npy", "--pairs", "short.npz")):
        assert_fails(run(*words), 1, "the file items.npy has dimension 48; the bank from short.np")
