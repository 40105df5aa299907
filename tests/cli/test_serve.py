"""milvus-hubness serve, as people start it."""

import json
import os
import signal
import time
import urllib.request
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
from milvus_lite.server_manager import server_manager_instance
from pymilvus import DataType

from milvus_hubness import (
    NNN,
    Beside,
    DualInvertedSoftmax,
    HubnessClient,
    MilvusStore,
    QueryBank,
    Recipe,
    connect,
    enable,
    migrate,
    plan_correction,
    status,
)
from milvus_hubness.jobs.store.records import TUNING_PROPERTY, TuningRecord, Verdicts
from tests.cli.conftest import DIM, assert_fails
from tests.support.galleries import plain_collection, vectors
from tests.support.projects import tomllib

COLLECTION = '[[collection]]\nname = "products"\n'
TOKEN = "sesame-0815"


@pytest.fixture
def corrected(files):
    """As `files`, with products corrected beside its vectors, a configuration of which `configured` writes."""
    store = MilvusStore(connect("shop.db"))
    bank = QueryBank.load("bank.npy")
    plan = plan_correction(store, "products", Recipe(bank, estimator=NNN(4)), Beside())
    enable(store, plan)
    return files


@pytest.fixture
def copied(files):
    """As `files`, with the corrected copy products_hubness."""
    store = MilvusStore(connect("shop.db"))
    migrate(
        store,
        plan_correction(store, "products", Recipe(QueryBank.load("bank.npy"), estimator=NNN(4))),
    )
    return store


def configured(text=COLLECTION, server=""):
    with open("hubness.toml", "w", encoding="utf-8") as file:
        file.write(f'[server]\nuri = "shop.db"\n{server}[http]\nlisten = "127.0.0.1:0"\n{text}')
    return "hubness.toml"


@pytest.mark.parametrize("text", ['{"version": 1}', '{"version": 2}', "["])
def test_a_collection_that_cannot_be_read_stops_no_other(corrected, run, text):
    client = connect("shop.db")
    plain_collection(client, "broken", vectors(np.random.default_rng(8), 9, DIM), "COSINE")
    client.alter_collection_properties("broken", {"hubness": text})
    config = configured('[[collection]]\nname = "broken"\n' + COLLECTION)
    insert_pending(3)
    done = run("serve", "--config", config, "--once", "--json")
    outcomes = [line["facts"] for line in done.lines() if line["name"] == "reconciled"]
    by_name = {outcome["collection"]: outcome for outcome in outcomes}
    assert done.returncode == 1
    assert by_name["broken"]["result"] == "failed"
    assert "the collection property 'hubness' of 'broken' " in by_name["broken"]["message"]
    assert by_name["products"]["result"] == "ok"
    assert pending() == 0
    checked = run("serve", "--config", config, "--check")
    assert checked.returncode == 2
    [fault] = checked.stderr.splitlines()
    assert "the collection property 'hubness' of 'broken' " in fault


def insert_pending(count, first=1_000):
    client = HubnessClient("shop.db")
    rows = vectors(np.random.default_rng(first), count, DIM)
    client.insert(
        "products",
        [{"id": first + n, "vector": row, "group": 1} for n, row in enumerate(rows)],
        bias="pending",
    )
    client.close()


def pending():
    return status(MilvusStore(connect("shop.db")), "products").pending


def test_what_is_wrong_is_told_with_its_paths_and_ends_with_2(corrected, run):
    done = run("serve", "--config", configured(COLLECTION + 'bank = "bank.npy"\n'), "--check")
    assert (done.returncode, done.stdout) == (0, "hubness.toml: valid, for products\n")
    np.save("wide.npy", np.ones((5, DIM + 1), np.float32))
    plain_collection(connect("shop.db"), "plain", np.eye(DIM, dtype=np.float32), "COSINE")
    config = configured(
        COLLECTION + 'bank = "wide.npy"\n'
        '[[collection]]\nname = "nothing"\nbank = "none.npy"\n'
        '[[collection]]\nname = "plain"\n'
        '[[collection]]\nname = "products"\nprofile = "image"\nbank = "collection:none"\n'
    )
    done = run("serve", "--config", config, "--json")
    faults = done.stderr.splitlines()
    assert done.returncode == 2
    assert [fault.split(": ")[1] for fault in faults] == [
        "collection[1].bank",
        "collection[0].bank",
        "collection[1].name",
        "collection[2].name",
        "collection[3].bank",
    ]
    for fault, words in zip(
        faults,
        [
            "none.npy: no such file",
            f"field 'vector' of 'products' has dimension {DIM}; the bank from",
            "name: no collection or alias 'nothing'",
            "'plain' is not corrected: migrate or enable it first",
            "no collection or alias 'none'",
        ],
        strict=True,
    ):
        assert words in fault
    assert json.loads(done.stdout)["error"]["faults"] == faults
    config = configured(
        COLLECTION + 'refesh = "5m"\nbank = "none.npy"\n'
        '[[collection]]\nname = "nothing"\nhub_scan_rows = -1\n[[collection]]\nfield = "x"\nbank = "none.npy"\n'
    )
    done = run("serve", "--config", config, "--check")
    said = [fault.split(": ", 1)[1] for fault in done.stderr.splitlines()]
    assert done.returncode == 2
    for fault, words in zip(
        said,
        [
            "collection[0].refesh: unknown key, did you mean 'refresh'?",
            "collection[1].hub_scan_rows: ",
            "collection[2].name: is missing",
            "collection[0].bank: none.npy: no such file",
            "collection[2].bank: none.npy: no such file",
            "collection[1].name: no collection or alias 'nothing'",
        ],
        strict=True,
    ):
        assert words in fault.replace(f"{os.getcwd()}/", "")
    done = run("serve", "--config", configured(COLLECTION + 'profile = "image"\n'), "--check")
    assert done.returncode == 2
    assert "collection[0].profile: no profile 'image'; profiles: default" in done.stderr


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            'method = "nnn"',
            "NNN(k=128, alpha=0.75) differs from NNN(k=4, alpha=0.5), which tune chose on 2026-05-04",
        ),
        (
            'method = "nnn"\nparams = { k = 4 }',
            "NNN(k=4, alpha=0.75) differs from NNN(k=4, alpha=0.5)",
        ),
        ('method = "csls"', "CSLS(k=10) differs from NNN(k=4, alpha=0.5)"),
        ('method = "nnn"\nparams = { k = 4, alpha = 0.5 }', None),
        ('method = "csls"\noverride = true', None),
        ("", None),
    ],
)
def test_a_method_other_than_the_one_that_tune_chose_needs_override(corrected, run, keys, said):
    """An example with a method once overrode what tune had chosen, for everybody who copied it."""
    store = MilvusStore(connect("shop.db"))
    [state] = store.info("products").states.values()
    verdict = TuningRecord(
        field=state.field,
        verdict="apply",
        choice={"name": "NNN", "k": 4, "alpha": 0.5},
        strength=0.8,
        reason="",
        labelled=False,
        bank_fingerprint=state.profile.bank.fingerprint,
        tuned_at=datetime(2026, 5, 4, tzinfo=timezone.utc),
    )
    store.write_property("products", TUNING_PROPERTY, Verdicts(records=(verdict,)))
    config = configured(f"{COLLECTION}{keys}\n")
    for mode in ("--check", "--once"):
        if said is None and mode == "--once":
            continue
        done = run("serve", "--config", config, mode)
        if said is None:
            assert (done.returncode, done.stderr) == (0, "")
            continue
        [line] = done.stderr.splitlines()
        assert (done.returncode, said in line) == (2, True), line
        assert line.endswith("remove method and params, or add override = true")
        assert line.startswith("hubness.toml: collection[0].method: ")


def test_without_a_database_the_configuration_is_neither_right_nor_wrong(files, run):
    with open("hubness.toml", "w", encoding="utf-8") as file:
        file.write(COLLECTION)
    done = run("serve", "--config", "hubness.toml", "--check", uri="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "no Milvus answers" in done.stderr


def test_secrets_are_never_printed(files, run):
    with open("token", "w", encoding="utf-8") as file:
        file.write(TOKEN)
    config = configured(f'[[collection]]\nname = "{TOKEN}"\n', 'token_file = "token"\n')
    done = run("serve", "--config", config, "--check", "--json")
    assert done.returncode == 2
    assert "***" in done.stderr
    assert TOKEN not in done.stderr + done.stdout
    with open(config, "w", encoding="utf-8") as file:
        file.write(COLLECTION)
    done = run("serve", "--config", config, "--check", uri=f"http://root:{TOKEN}@127.0.0.1:9")
    assert done.returncode == 2
    assert TOKEN not in done.stderr + done.stdout


def test_once_does_what_is_due_and_ends_with_1_where_that_failed(corrected, run, monkeypatch):
    insert_pending(7)
    np.save("more.npy", vectors(np.random.default_rng(9), 50, DIM))
    config = configured(COLLECTION + 'bank = "more.npy"\nmethod = "nnn"\nparams = { k = 5 }\n')
    done = run("serve", "--config", config, "--once", "--json")
    assert done.returncode == 0, done.stderr
    [looked] = [line["facts"] for line in done.lines() if line["name"] == "reconciled"]
    assert (looked["action"], looked["scanned"], looked["result"]) == ("full", 67, "ok")
    found = status(MilvusStore(connect("shop.db")), "products")
    assert (found.pending, found.bank["count"], found.estimator["k"], found.epoch) == (0, 50, 5, 2)
    assert "reconciled" not in run("serve", "--config", config, "--once").stdout, "nothing was due"
    insert_pending(3, first=2_000)
    printed = run("serve", "--config", config, "--once").stdout
    assert "Z reconciled collection=products result=ok action=pending message=" in printed
    assert " written=3 " in printed
    monkeypatch.setattr("milvus_hubness.serve.config.read_bank", lambda *given: 1 / 0)
    done = run("serve", "--config", configured(COLLECTION + 'bank = "bank.npy"\n'), "--once")
    assert done.returncode == 1
    assert (
        "collection=products result=failed action=unfinished message=ZeroDivisionError"
        in done.stdout
    )


def test_new_biases_in_the_vectors_come_with_copies(copied, run):
    table = '[[collection]]\nname = "products_hubness"\nmethod = "nnn"\nparams = { k = 4 }\n'
    made = []
    for number in range(3):
        np.save("bank.npy", vectors(np.random.default_rng(number), 50, DIM))
        if not number:
            done = run("serve", "--config", configured(table + 'bank = "bank.npy"\n'), "--once")
            assert done.returncode == 1
            assert "no alias leads there" in done.stdout
        text = table + 'bank = "bank.npy"\nrename = true\nkeep_former = 0\n'
        done = run("serve", "--config", configured(text), "--once", "--json")
        [looked] = [line["facts"] for line in done.lines() if line["name"] == "reconciled"]
        assert (looked["action"], looked["written"], looked["result"]) == ("full", 60, "ok")
        made.append(copied.alias_target("products_hubness"))
    assert made == [f"products_hubness_r{number}" for number in (2, 3, 4)]
    assert [copied.exists(name) for name in made] == [False, False, True]
    # To the first copy nobody has switched by a command: it stays.
    assert copied.exists("products_hubness__before_hubness")


@pytest.mark.long
def test_told_to_stop_it_ends_in_the_middle_of_a_refresh_and_the_next_one_carries_on(
    corrected, run, started
):
    insert_pending(6_000)
    server_manager_instance.release_server("shop.db")
    process = started(
        "serve",
        "--config",
        configured(COLLECTION + "rows_per_second = 1000\nclient_ttl = 0\n"),
        "--json",
    )
    line = json.loads(process.stdout.readline())
    url = line["facts"]["url"]
    assert url.startswith("http://127.0.0.1:")
    until = time.monotonic() + 60
    while "missing biases, 2000 of" not in at_work(url):
        assert process.poll() is None
        assert time.monotonic() < until, "it never came to the middle"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    told, complained = process.communicate(timeout=30)
    assert (process.returncode, complained) == (0, "")
    events = [json.loads(line) for line in told.splitlines()]
    assert [event["name"] for event in events if event["name"] != "missed"] == [
        "stopping",
        "reconciled",
        "stopped",
    ]
    assert [event["facts"]["result"] for event in events if event["name"] == "reconciled"] == [
        "stopped"
    ]
    left = pending()
    assert 0 < left < 6_000
    done = run("serve", "--config", configured(), "--once", "--json")
    [looked] = [line["facts"] for line in done.lines() if line["name"] == "reconciled"]
    assert (done.returncode, looked["action"], looked["written"]) == (0, "pending", left)
    assert pending() == 0


@pytest.mark.long
def test_a_second_service_started_by_mistake_changes_nothing_for_a_minute(
    served, tmp_path, monkeypatch, started
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILVUS_HUBNESS_URI", served.uri)
    rng, name = np.random.default_rng(6), served.name("served")
    banks = {each: vectors(rng, 40, DIM) for each in ("right", "wrong")}
    client = served.client(HubnessClient)
    client.create_collection(name, DIM, metric_type="COSINE", consistency_level="Strong")
    rows = [{"id": i, "vector": vector} for i, vector in enumerate(vectors(rng, 300, DIM))]
    client.insert(name, rows[:200])
    store = served.store()
    bank = QueryBank(banks["right"])
    enable(store, plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Beside()))
    services = {}
    for each, bank in banks.items():
        np.save(f"{each}.npy", bank)
        with open(f"{each}.toml", "w", encoding="utf-8") as file:
            file.write(
                f'[server]\nuri = "{served.uri}"\n[http]\nlisten = "127.0.0.1:0"\n[[collection]]\n'
                f'name = "{name}"\nbank = "{each}.npy"\nmethod = "nnn"\nparams = {{ k = 4 }}\n'
                'fill = "2s"\nrefresh = "2s"\nclient_ttl = 0\n'
            )
        services[each] = started(
            "serve", "--config", f"{each}.toml", "--json", MILVUS_HUBNESS_URI=served.uri
        )
        events_until(services[each], "reconciled")
    before, ends = status(served.store(), name), time.monotonic() + 60
    for part in range(10):
        client.insert(name, rows[200 + 10 * part : 210 + 10 * part], bias="pending")
        while status(served.store(), name).pending:
            assert time.monotonic() < ends + 30, "the first one does nothing either"
            time.sleep(0.2)
        time.sleep(max(0, ends - time.monotonic()) / (10 - part))
        now = status(served.store(), name)
        assert (now.epoch, now.bank) == (before.epoch, before.bank)
    for each in services.values():
        each.send_signal(signal.SIGTERM)
    told = {
        each: [json.loads(line) for line in process.communicate(timeout=60)[0].splitlines()]
        for each, process in services.items()
    }
    results = {
        each: {event["facts"]["result"] for event in events if event["name"] == "reconciled"}
        for each, events in told.items()
    }
    assert results == {"right": {"ok"}, "wrong": {"busy"}}
    assert (store.count(name), status(store, name).pending) == (300, 0)


def events_until(process, name):
    """What a service tells, up to the first event of that name."""
    while line := process.stdout.readline():
        event = json.loads(line)
        if event["name"] == name:
            return event
    raise AssertionError(process.communicate()[1])


def at_work(url):
    """What the status says that a look is doing."""
    with urllib.request.urlopen(f"{url}/status.json", timeout=5) as answer:
        running = json.load(answer)["collections"][0]["running"]
    return "{doing}, {done} of {total}".format(**running) if running else ""


def test_the_first_configuration_fits_what_is_there(corrected, run):
    """Written for an alias, it is valid, and the service runs with it."""
    connect("shop.db").create_alias("products", 'shop\'s "live"')
    name = connect("shop.db").list_aliases("products")["aliases"][0]
    wrote = run("serve", "--init", name)
    assert wrote.returncode == 0, wrote.stderr
    assert "milvus-hubness serve --config hubness.toml --check" in wrote.stdout
    assert run("serve", "--config", "hubness.toml", "--check").returncode == 0
    insert_pending(2)
    done = run("serve", "--once", "--json")
    [outcome] = [line["facts"] for line in done.lines() if line["name"] == "reconciled"]
    assert (outcome["collection"], outcome["result"]) == (name, "ok")
    assert status(MilvusStore(connect("shop.db")), "products").pending == 0


def test_the_first_configuration_has_a_table_for_each_field_and_profile(files, run):
    client = HubnessClient("shop.db")
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    index = client.prepare_index_params()
    for field in ("image", "text"):
        schema.add_field(field, DataType.FLOAT_VECTOR, dim=DIM)
        index.add_index(field, index_type="FLAT", metric_type="COSINE")
    client.create_collection("posts", schema=schema, index_params=index)
    both = vectors(np.random.default_rng(3), 60, DIM)
    client.insert("posts", [{"id": i, "image": row, "text": row} for i, row in enumerate(both)])
    for field in ("image", "text"):
        options = ("--field", field, "--bank", "bank.npy", "--param", "k=8", "--force")
        done = run("enable", "posts", *options)
        assert done.returncode == 0, done.stderr
    folder = files / "etc"
    folder.mkdir()
    config = str(folder / "posts.toml")
    assert run("serve", "--config", config, "--init", "posts").returncode == 0
    tables = tomllib.loads(Path(config).read_text())
    assert [table["field"] for table in tables["collection"]] == ["image", "text"]
    checked = run("serve", "--config", config, "--check")
    assert checked.returncode == 0, checked.stderr
    assert "bank = " not in "".join(
        line for line in Path(config).read_text().splitlines() if not line.startswith("#")
    ), "the bank in use stays"


def test_the_first_configuration_serves_before_a_query_is_sampled(corrected, run):
    """The bank in use stays until samples are enough: a bank of none, or of a few, would fail or be worse."""
    assert run("bank", "sample", "products").returncode == 0
    wrote = run("serve", "--init", "products")
    assert wrote.returncode == 0, wrote.stderr
    [table] = tomllib.loads(Path("hubness.toml").read_text())["collection"]
    assert ("bank" in table, table["refit_share"]) == (False, 0.2)
    done = run("serve", "--once", "--json")
    assert done.returncode == 0, done.stdout


def test_the_first_configuration_says_that_no_alias_leads_to_a_copy(copied, run):
    assert run("serve", "--init", "products_hubness").returncode == 0
    text = Path("hubness.toml").read_text()
    assert "none leads here: create the one" in text
    Path("hubness.toml").unlink()
    connect("shop.db").create_alias("products_hubness", "live")
    assert run("serve", "--init", "live").returncode == 0
    assert "none leads here" not in Path("hubness.toml").read_text()


def test_the_first_configuration_leaves_the_banks_of_several_profiles(copied, run):
    """Samples are of a field: with them as the bank of each, all profiles would be one."""
    connect("shop.db").create_alias("products_hubness", "live")
    added = ("--profile", "other", "--bank", "bank.npy", "--param", "k=4", "--force")
    for command in (
        ("refresh", "live", *added),
        ("bank", "sample", "live"),
        ("serve", "--init", "live"),
    ):
        done = run(*command)
        assert done.returncode == 0, done.stderr
    tables = tomllib.loads(Path("hubness.toml").read_text())["collection"]
    assert [(table["profile"], table.get("bank")) for table in tables] == [
        ("default", None),
        ("other", None),
    ]


def test_the_first_configuration_replaces_no_file_and_names_what_is_not_corrected(corrected, run):
    plain_collection(connect("shop.db"), "plain", np.eye(DIM, dtype=np.float32), "COSINE")
    assert_fails(run("serve", "--init", "plain"), 1, "'plain' is not corrected")
    assert not Path("hubness.toml").exists()
    assert_fails(run("serve", "--init", "nothing"), 1, "nothing")
    Path("hubness.toml").write_text("# mine\n")
    assert_fails(run("serve", "--init", "products"), 2, "hubness.toml exists")
    assert Path("hubness.toml").read_text() == "# mine\n"


@pytest.mark.parametrize(
    ("server", "path", "said"),
    [
        ('token_file = "gone"\n', "server.token_file", "no such file"),
        ('ca = "gone.pem"\n', "server.ca", "no such file"),
        ('key = "gone.pem"\n', "server.key", "belong together"),
    ],
)
def test_a_file_of_the_server_is_named_with_its_key(corrected, run, server, path, said):
    """No database is opened without them, and the other faults of the file are shown too."""
    config = configured(COLLECTION + 'bank = "gone.npy"\n', server)
    done = run("serve", "--config", config, "--check", "--json")
    assert done.returncode == 2
    [fault] = [line for line in json.loads(done.stdout)["error"]["faults"] if path in line]
    assert said in fault
    if path != "server.key":
        assert "collection[0].bank" in done.stderr


@pytest.mark.parametrize(
    ("keys", "path", "said"),
    [
        ('method = "dualis"\n', "collection[0].method", "add the key target_bank"),
        ('method = "dbsn"\n', "collection[0].method", "add the key target_bank"),
        ("prior_weight = 0.2\n", "collection[0].prior_weight", "add the key prior"),
        ('queries = "few.npy"\n', "collection[0].queries", "3 queries cannot judge a bank"),
        ('queries = "collection:few"\n', "collection[0].queries", "3 queries cannot judge a bank"),
        ('measure = "MRR"\n', "collection[0].measure", "add the key pairs"),
    ],
)
def test_what_no_refresh_could_follow_is_a_fault_of_the_file(corrected, run, keys, path, said):
    few = vectors(np.random.default_rng(6), 3, DIM)
    np.save("few.npy", few)
    plain_collection(connect("shop.db"), "few", few, "COSINE")
    done = run("serve", "--config", configured(COLLECTION + keys), "--check")
    assert_fails(done, 2, f"{path}: ", said)


def test_what_the_stored_profile_has_need_not_be_in_the_file(files, run):
    """Its reference items and its prior stay, so that a method and a weight go with them."""
    items = vectors(np.random.default_rng(7), 30, DIM)
    recipe = Recipe(
        QueryBank.load("bank.npy"),
        target_bank=items,
        estimator=DualInvertedSoftmax(),
        prior="group",
    )
    enable("shop.db", plan_correction("shop.db", "products", recipe, Beside()))
    keys = 'method = "dualis"\nparams = { temperature_query = 0.7 }\nprior_weight = 0.2\n'
    done = run("serve", "--config", configured(COLLECTION + keys), "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "second",
    ['[[collection]]\nname = "live"\n', COLLECTION + 'profile = "default"\n'],
    ids=["by-its-alias", "by-its-profile"],
)
def test_a_profile_has_one_table_whatever_it_is_called(corrected, run, second):
    connect("shop.db").create_alias("products", "live")
    done = run("serve", "--config", configured(COLLECTION + second), "--check")
    assert_fails(done, 2, "collection[1].name", "'products', as collection[0] is: remove one")
