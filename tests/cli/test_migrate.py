"""milvus-hubness migrate, from the plan to what is left after cleaning up."""

import json
import re
import shlex

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    Beside,
    Copy,
    HubnessClient,
    InvalidParameter,
    MilvusStore,
    Recipe,
    connect,
    cutover,
    migrate,
    plan_correction,
    resume,
)
from milvus_hubness.cli import console
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.store.ownership import LEDGER
from tests.cli.conftest import DIM, assert_fails, collections
from tests.support.galleries import vectors

BANK = ("--bank", "bank.npy", "--param", "k=8")
SWITCHED = {"products", "products_hubness", "products__bank", LEDGER}


@pytest.fixture
def live(files):
    """An alias over the collection."""
    client = connect("shop.db")
    client.create_alias("products", "live")
    return client


def behind(client, name):
    return client.describe_collection(name)["collection_name"]


def interrupted(monkeypatch, method):
    """`MilvusStore.method` ends the process, as a SIGKILL there would, as far as the database can tell."""

    def end(*arguments, **named):
        raise SystemExit(137)

    monkeypatch.setattr(MilvusStore, method, end)


def test_a_plan_writes_nothing(run, files):
    plan = run("migrate", "run", "--plan", "products", *BANK, "--rename")
    assert plan.returncode == 0, plan.stderr
    for fact in (
        "products_hubness",
        "COSINE, served as IP",
        "8 -> 16",
        "40 queries",
        "NNN(k=8, alpha=0.75",
    ):
        assert fact in plan.stdout
    assert "products becomes an alias of the copy" in plan.stdout
    assert "Nothing was written" in plan.stdout
    told = json.loads(
        run("migrate", "run", "--plan", "products", *BANK, "--alias", "live", "--json").stdout
    )["plan"]
    assert (told["rows"], told["alias"], told["rename"]) == (60, "live", False)
    required = run("migrate", "run", "--plan", "products", *BANK, MILVUS_HUBNESS_VERDICT="require")
    assert "the command would stop at this verdict" in required.stdout
    assert "would stop" not in run("migrate", "run", "--plan", "products", *BANK, "--force").stdout
    assert collections(files) == {"products"}
    assert run("migrate", "status").stdout.strip() == "There are no migrations in this database."
    assert collections(files) == {"products"}


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("migrate", "run"), "--alias"),
        (("migrate", "run", "--plan"), "--target"),
        (("migrate", "run", "--plan"), "--bank-name"),
        (("enable",), "--bank-name"),
    ],
)
def test_a_name_that_no_server_takes_is_refused_before_the_first_write(run, files, command, option):
    before = collections(files)
    refused = run(*command, "products", "--bank", "bank.npy", "--force", option, "bad name!")
    assert_fails(refused, 2, "'bad name!' is no name for a collection or alias")
    assert collections(files) == before


def test_a_plan_tells_of_the_index_that_the_copy_is_to_have(run, files):
    index = ("--index-type", "IVF_FLAT", "--index-param", "nlist=4")
    plan = run("migrate", "run", "--plan", "products", *BANK, *index)
    assert "IVF_FLAT nlist 4" in plan.stdout
    assert "the source's index is" in plan.stdout
    wrong = run("migrate", "run", "--plan", "products", *BANK, "--index-param", "nlist")
    assert wrong.returncode == 2, wrong.stderr
    assert "--index-param must be NAME=VALUE, not 'nlist'" in wrong.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--plan", "--rehearse"), "either --plan or --rehearse"),
    ],
)
def test_how_far_a_run_goes_is_said_once(run, files, options, words):
    before = collections(files)
    refused = run("migrate", "run", "products", *BANK, *options)
    assert (refused.returncode, words in refused.stderr) == (2, True)
    assert collections(files) == before


def test_a_rehearsal_moves_no_name_whatever_name_is_given(run, files):
    rehearsed = run("migrate", "run", "products", *BANK, "--alias", "new", "--rehearse")
    assert rehearsed.returncode == 0, rehearsed.stderr
    assert "migrate cutover products --alias new" in rehearsed.stdout
    assert "new" not in collections(files)
    assert connect("shop.db").list_aliases("products_hubness")["aliases"] == []


def test_a_restart_needs_the_bank_that_it_begins_with(run, files):
    """Without it, a run carries on from what there is."""
    assert run("migrate", "run", "--rehearse", "products", *BANK).returncode == 0
    for extent in ((), ("--rehearse",)):
        refused = run("migrate", "run", "products", "--restart", *extent)
        assert refused.returncode == 2
        assert "--restart begins again: pass --bank FILE too" in refused.stderr


def test_a_rehearsal_refuses_a_name_that_cannot_move(run, files):
    """At its beginning, and when it goes on: the run after it would end there."""
    rehearse = ("migrate", "run", "--rehearse", "products")
    wrong = ("--alias", "products")
    before = collections(files)
    assert_fails(run(*rehearse, *BANK, *wrong), 1, "alias 'products' is the name of")
    assert collections(files) == before
    assert run(*rehearse, *BANK).returncode == 0
    assert_fails(run(*rehearse, *wrong), 1, "alias 'products' is the name of")


def test_a_rehearsal_tries_the_rights_of_an_application(run, live, files):
    """Milvus Lite, which has no users, grants all; the requests change nothing."""
    (files / "token").write_text("shop:secret-of-the-shop")
    rehearse = ("migrate", "run", "--rehearse", "products", *BANK)
    rehearsed = run(*rehearse, MILVUS_HUBNESS_APPLICATION_TOKEN_FILE="token")
    assert rehearsed.returncode == 0, rehearsed.stderr
    every = "Search, Query, Insert, Upsert, Delete"
    words = " ".join(rehearsed.stdout.split())
    assert f"application has {every} on the source; lacks nothing for the copy" in words
    assert "secret-of-the-shop" not in rehearsed.stdout
    for name in ("products", "products_hubness"):
        [row] = live.query(name, output_fields=["count(*)"])
        assert row["count(*)"] == 60

    without = run(*rehearse, "--json", MILVUS_HUBNESS_APPLICATION_TOKEN_FILE="")
    assert without.lines()[-1]["facts"]["application"] is None
    again = run(*rehearse, "--json", MILVUS_HUBNESS_APPLICATION_TOKEN="shop:secret-of-the-shop")
    facts = again.lines()[-1]["facts"]
    assert facts["application"] == {"has": every.split(", "), "lacks": {}}


def test_from_a_rehearsal_to_the_switch_and_back(run, live, files):
    rehearsed = run("migrate", "run", "--rehearse", "products", *BANK)
    assert rehearsed.returncode == 0, rehearsed.stderr
    for fact in (
        "copying",
        "rows/s",
        "MiB",
        "60 rows, ",
        "0 of 60",
        "--alias live",
        "--drop products_",
    ):
        assert fact in rehearsed.stdout
    assert behind(live, "live") == "products"
    standing = run("migrate", "status", "live")
    for fact in ("verified", "60 of 60", "1 of 1", "write to products_hubness too"):
        assert fact in standing.stdout

    switched = run("migrate", "run", "products", *BANK, "--alias", "live", "--json")
    assert switched.returncode == 0, switched.stderr
    lines = switched.lines()
    assert [line["name"] for line in lines if line["name"] != "catching-up"] == [
        "plan", "continuing", "before-verify", "verified", "before-cutover", "after-cutover", "result",
    ]  # fmt: skip
    assert (lines[-1]["facts"]["phase"], lines[-1]["facts"]["verified"]["rows"]) == ("switched", 60)
    assert behind(live, "live") == "products_hubness"
    for options, said in (
        (["--index-type", "HNSW"], "--index-type: the migration of 'products' to"),
        (["--index-param", "nlist=3"], "--index-param nlist"),
        (["--gate", "1"], "--gate"),
        (["--bank-name", "other"], "--bank-name"),
        (["--param", "alpha=0.5"], "--method"),
        (["--target-bank", "bank.npy"], "--target-bank"),
        (["--rename"], "--rename"),
    ):
        name = [] if "--rename" in options else ["--alias", "live"]
        refused = run("migrate", "run", "products", *BANK, *name, *options)
        assert_fails(refused, 2, said, "'switched'")
    assert_fails(run("migrate", "run", "products", *BANK, "--alias", "other"), 2, "--alias other")
    again = run("migrate", "run", "products", *BANK, "--alias", "live")
    assert again.returncode == 0, again.stderr
    assert "switched" in again.stdout
    assert "live -> products_hubness" in again.stdout
    assert "60 rows" in run("migrate", "verify", "live").stdout

    client = HubnessClient("shop.db")
    added = vectors(np.random.default_rng(9), 3, DIM)
    client.insert(
        "live", [{"id": 100 + i, "vector": row, "group": 0} for i, row in enumerate(added)]
    )
    assert_fails(run("migrate", "verify", "live"), 1, "does not hold", "100")
    revert = run("migrate", "rollback", "live")
    assert revert.returncode == 0, revert.stderr
    assert "live -> products" in revert.stdout
    assert "3 rows written since the switch" in revert.stdout
    assert len(live.get("live", ids=[100, 101, 102])) == 3

    preview = run("migrate", "clean", "live", "--drop", "products_hubness")
    assert preview.returncode == 0, preview.stderr
    assert "Would be dropped for good" in preview.stdout
    assert "Nothing was dropped. Repeat the command with --yes" in preview.stdout
    for drop, said in (("others", "'others' is neither"), ("products", "rolled back")):
        refused = run("migrate", "clean", "live", "--drop", drop, "--yes")
        assert_fails(refused, 1, said)
        assert not refused.stdout
    assert collections(files) == SWITCHED
    cleaned = run("migrate", "clean", "live", "--drop", "products_hubness", "--yes", "--json")
    assert json.loads(cleaned.stdout)["clean"]["dropped"] == {
        "the copy": "products_hubness, 63 rows",
        "the bank": "products__bank",
    }
    assert collections(files) == {"products", LEDGER}


@pytest.mark.parametrize("command", [("migrate", "run"), ("enable",)], ids=" ".join)
def test_a_second_job_is_refused_before_it_prints_a_plan(run, files, command):
    with Lease(MilvusStore(connect("shop.db")), "products"):
        refused = run(*command, "products", "--bank", "bank.npy")
    assert_fails(refused, 1, "wait until it ends, or stop it")
    assert refused.stdout == ""


def test_a_name_that_a_switch_leaves_on_the_source(run, live):
    """It is said by all commands that show a switch, with what moves that name instead."""
    switched = run("migrate", "run", "products", *BANK, "--alias", "other")
    assert switched.returncode == 0, switched.stderr
    said = "live still leads to products: applications that read it have no correction"
    for shown in (switched, run("migrate", "status", "products")):
        assert said in " ".join(shown.stdout.split())
    commands = "migrate rollback other, then migrate run products --alias live"
    assert commands in " ".join(switched.stdout.split())

    assert run("migrate", "rollback", "other").returncode == 0
    moved = run("migrate", "run", "products", "--alias", "live")
    assert moved.returncode == 0, moved.stderr
    assert behind(live, "live") == "products_hubness"
    # The rollback has moved this one to the source.
    assert "other still leads to products" in " ".join(moved.stdout.split())


def pasted(done, before):
    """The words of a command that another one printed after a text, on one line however narrow the
    terminal is, as it is copied. The first, where there are several."""
    text, *_ = re.findall(rf"^{before}\s*milvus-hubness (.*)$", done.stdout, re.MULTILINE)
    return shlex.split(text)


def test_the_commands_that_a_run_proposes_find_its_database(run, files):
    """The address is that of an option, as the environment has none; the terminal is narrow."""
    elsewhere = {"uri": "elsewhere.db", "COLUMNS": "50"}
    named = ("--uri", "shop.db")
    steps = [
        (("migrate", "run", "products", *BANK), "To switch: "),
        (("migrate", "run", "products", *BANK, "--alias", "live"), "To undo:"),
        (("migrate", "rollback", "live"), "To drop the copy: "),
        (("migrate", "run", "products", *BANK, "--restart", "--rehearse"), "To switch: "),
        (("migrate", "run", "products", *BANK, "--restart", "--rehearse"), "To drop it: "),
    ]
    for words, before in steps:
        done = run(*words, *named, **elsewhere)
        assert done.returncode == 0, done.stderr
        proposed = pasted(done, before)
        assert proposed[-2:] == list(named)
    # The last one, as it is printed.
    assert "products_hubness" in run(*proposed, **elsewhere).stdout


def test_step_by_step_under_the_collections_own_name(run, files):
    begun = run("migrate", "run", "products", *BANK, "--no-writers")
    assert begun.returncode == 0, begun.stderr
    assert "migrate cutover products" in begun.stdout
    assert run("migrate", "cutover", "products").returncode == 2
    switched = run("migrate", "cutover", "products", "--rename", "--no-writers", "--json")
    assert switched.returncode == 0, switched.stderr
    facts = switched.lines()[-1]["facts"]
    assert facts["switch"]["source_renamed"] == "products__before_hubness"
    assert 0 < facts["switch"]["window"] < 10
    table = run("migrate", "status")
    assert "products_hubness" in table.stdout
    assert "switched" in table.stdout
    cleaned = run("migrate", "clean", "products", "--drop", "products__before_hubness", "--yes")
    assert cleaned.returncode == 0, cleaned.stderr
    assert "products__before_hubness, 60 rows" in cleaned.stdout
    assert collections(files) == {"products_hubness", "products__bank", LEDGER}
    assert behind(connect("shop.db"), "products") == "products_hubness"


def test_a_plan_counts_the_wait_for_clients(run, files, monkeypatch):
    def seconds(*options):
        plan = json.loads(
            run("migrate", "run", "--plan", "products", *BANK, *options, "--json").stdout
        )["plan"]
        assert plan["estimated_seconds"] >= plan["waiting_seconds"]
        return plan["waiting_seconds"]

    assert seconds("--no-writers") == 0
    monkeypatch.setenv("MILVUS_HUBNESS_CLIENT_TTL", "100")
    assert seconds("--no-writers", "--alias", "live") == 0
    assert 90 < seconds() <= 100
    # Until all writes reach both, and until all clients have read that the name has moved.
    assert seconds("--alias", "live") == 200
    told = run("migrate", "run", "--plan", "products", *BANK).stdout
    assert "for clients to hear of it" in " ".join(told.split())


def test_of_two_copies_the_one_that_is_meant_is_named(run, files):
    assert run("migrate", "run", "products", *BANK, "--no-writers").returncode == 0
    other = ("--target", "other", "--bank-name", "other_bank")
    assert run("migrate", "run", "products", *BANK, *other, "--no-writers").returncode == 0
    for command in (
        ["cutover", "products", "--alias", "live", "--no-writers"],
        ["clean", "products", "--drop", "products", "--yes"],
        ["verify", "products"],
        ["status", "products"],
        ["run", "products", "--no-writers"],
        ["rollback", "products", "--no-writers"],
    ):
        assert_fails(
            run("migrate", *command), 1, "several copies (other, products_hubness)", "--target"
        )
    both = run("migrate", "status", "--json")
    assert {each["phase"] for each in json.loads(both.stdout)["migrations"]} == {"verified"}

    assert run("migrate", "verify", "products", "--target", "other").returncode == 0
    assert "other" in run("migrate", "status", "other").stdout
    assert_fails(
        run("migrate", "verify", "products", "--target", "nope"), 1, "'products' to 'nope'"
    )
    done = run(
        "migrate", "cutover", "products", "--target", "other", "--alias", "live", "--no-writers"
    )
    assert done.returncode == 0, done.stderr
    assert behind(connect("shop.db"), "live") == "other"
    cleaned = run("migrate", "clean", "products", "--drop", "products_hubness", "--yes")
    assert cleaned.returncode == 0, cleaned.stderr
    assert {"other", "products"} <= collections(files)
    assert "products_hubness" not in collections(files)
    assert run("migrate", "rollback", "products", "--no-writers").returncode == 0


def test_a_switch_that_was_killed_half_way_is_carried_on_with(run, files, monkeypatch):
    asked = ("migrate", "run", "products", *BANK, "--rename", "--no-writers")
    with monkeypatch.context() as broken:
        interrupted(broken, "point_alias")
        assert run(*asked).returncode == 137
    assert not connect("shop.db").has_collection("products")
    told = run("migrate", "status", "products", "--json")
    assert json.loads(told.stdout)["migration"]["phase"] == "switching"
    done = run(*asked)
    assert done.returncode == 0, done.stderr
    assert behind(connect("shop.db"), "products") == "products_hubness"

    with monkeypatch.context() as broken:
        interrupted(broken, "rename")
        assert run("migrate", "rollback", "products", "--no-writers").returncode == 137
    assert not connect("shop.db").has_collection("products")
    done = run("migrate", "run", "products", "--no-writers")
    assert done.returncode == 0, done.stderr
    assert "rolled back" in done.stdout
    assert behind(connect("shop.db"), "products") == "products"


def test_the_token_of_a_file_is_told_to_nobody(run, files, capsys, monkeypatch):
    (files / "token").write_text("s3cret-token\n")
    monkeypatch.setenv("MILVUS_HUBNESS_TOKEN_FILE", "token")
    asked = ("migrate", "run", "products", *BANK, "--no-writers", "--json")
    (files / "control.json").write_text('{"pace": "s3cret-token"}')
    done = run(*asked, "--control", "control.json")
    assert done.returncode == 0
    assert "s3cret" not in done.stdout + done.stderr
    ledger = MilvusStore(connect("shop.db"))
    assert "s3cret" not in str(Ledger(ledger).migrations())
    console.report_error(ValueError("refused: s3cret-token"), as_json=True)
    assert "s3cret" not in "".join(capsys.readouterr())


def test_a_copy_that_is_gone_is_told_in_one_line_with_the_way_out(run, files):
    assert run("migrate", "run", "products", *BANK, "--no-writers").returncode == 0
    connect("shop.db").drop_collection("products_hubness")
    for command in (
        ["run", "products", *BANK],
        ["run", "products"],
        ["cutover", "products", "--rename"],
    ):
        gone = run("migrate", *command, "--no-writers")
        assert gone.returncode == 1
        assert "verified" not in gone.stdout
        [line] = gone.stderr.splitlines()
        assert "the copy 'products_hubness' of 'products' is gone" in line
        assert "milvus-hubness migrate run products --bank FILE --restart" in line
    assert "is gone" in run("migrate", "status").stdout
    told = json.loads(run("migrate", "status", "products", "--json").stdout)["migration"]
    assert "is gone" in told["problem"]
    again = run("migrate", "run", "products", *BANK, "--no-writers", "--restart")
    assert again.returncode == 0, again.stderr
    assert "60 rows" in again.stdout
    assert (
        json.loads(run("migrate", "status", "products", "--json").stdout)["migration"]["problem"]
        is None
    )


def test_a_run_that_continues_reports_its_phase_and_its_rows(run, files):
    assert run("migrate", "run", "products", *BANK, "--no-writers").returncode == 0
    again = run("migrate", "run", "products", "--no-writers", "--json")
    assert again.returncode == 0, again.stderr
    [event] = [line for line in again.lines() if line["name"] == "continuing"]
    facts = event["facts"]
    assert (facts["phase"], facts["rows"], facts["rows_total"]) == ("verified", 60, 60)


def test_after_a_rollback_other_options_are_told_in_a_few_words(run, live):
    assert run("migrate", "run", "products", *BANK, "--alias", "live").returncode == 0
    assert run("migrate", "rollback", "live").returncode == 0
    other = ("--bank", "bank.npz", "--bank-column", "queries", "--method", "blend")
    plan = run("migrate", "run", "--plan", "products", *other)
    assert plan.returncode == 0, plan.stderr
    assert "started with other options" in plan.stdout.replace("\n", " ")
    refused = run("migrate", "run", "products", *other)
    assert refused.returncode == 1
    message = refused.stderr.splitlines()[-1]
    assert "--restart" in message
    assert len(message) < 300
    assert "{" not in message


def test_a_run_that_continues_names_the_options_that_differ_and_no_others(run, files):
    """A prior has one source: who names a field has said nothing of a log of clicks, and vice versa."""
    np.savez("clicks.npz", key=np.arange(30))
    assert run("migrate", "run", "products", *BANK, "--no-writers").returncode == 0
    for option, value in (("--prior", "group"), ("--prior-from", "clicks.npz"), ("--gate", "3")):
        done = run("migrate", "run", "products", option, value, "--no-writers")
        assert_fails(done, 2, f"{option}: the migration of 'products'")

    weighted = ("--prior", "group", "--prior-weight", "0.2")
    begun = run("migrate", "run", "products", *BANK, *weighted, "--no-writers", "--restart")
    assert begun.returncode == 0, begun.stderr
    assert run("migrate", "run", "products", *weighted, "--no-writers").returncode == 0
    other = run("migrate", "run", "products", "--prior-from", "clicks.npz", "--no-writers")
    assert_fails(other, 2, "--prior-from: the migration of 'products'")


@pytest.mark.parametrize("rate", ["0", "-3", "nan"])
def test_a_plan_refuses_the_rate_that_its_run_would(run, files, rate):
    for extent in ([], ["--plan"], ["--rehearse"]):
        done = run("migrate", "run", "products", *BANK, *extent, "--rows-per-second", rate)
        assert_fails(done, 2, "rows_per_second must be a positive number")
    assert collections(files) == {"products"}


@pytest.mark.parametrize("option", ["--alias", "--target", "--bank-name"])
@pytest.mark.parametrize("extent", [[], ["--plan"], ["--rehearse"]], ids=" ".join)
def test_an_empty_name_is_refused_before_anything_is_written(run, files, option, extent):
    """As of a variable that is not set: a run without the option would be another one."""
    done = run("migrate", "run", "products", *BANK, option, "", *extent)
    assert done.returncode == 2, done.stdout
    assert ("--alias is empty" if option == "--alias" else "'' is no name") in done.stderr
    assert collections(files) == {"products"}


def test_an_empty_name_in_python(files):
    for words in ({"alias": ""}, {"target": ""}):
        with pytest.raises(InvalidParameter, match=r"^'' is no name for a collection or alias"):
            plan_correction("shop.db", "products", "bank.npy", Copy(**words))
    with pytest.raises(InvalidParameter, match=r"^'' is no name for a collection or alias"):
        plan_correction("shop.db", "products", "bank.npy", Beside(), bank_collection="")
    migrate("shop.db", plan_correction("shop.db", "products", Recipe("bank.npy", estimator=NNN(4))))
    for job in (cutover, resume):
        with pytest.raises(InvalidParameter, match=r"^'' is no name for a collection or alias"):
            job("shop.db", "products", alias="")
