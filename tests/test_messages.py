"""The messages for wrong input, word for word: object, problem and remedy in one line."""

import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from milvus_lite.server_manager import server_manager_instance
from pymilvus import DataType

from milvus_hubness import (
    NNN,
    Blend,
    HubnessClient,
    HubnessError,
    Layout,
    MilvusStore,
    QueryBank,
    Recipe,
    connect,
    migrate,
    plan_correction,
)
from milvus_hubness.cli import main
from milvus_hubness.jobs.common.lease import Lease
from tests.support.galleries import plain_collection, vectors

DIM, ROWS, QUERIES = 8, 60, 40
URI = "shop.db"


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """The working folder: banks, and a Milvus Lite file with a plain, a corrected, a half migrated and a
    two-field collection."""
    folder, former = tmp_path_factory.mktemp("shop"), Path.cwd()
    os.chdir(folder)
    rng = np.random.default_rng(4)
    bank, rows = vectors(rng, QUERIES, DIM), vectors(rng, ROWS, DIM)
    np.save("bank.npy", bank)
    np.save("narrow.npy", bank[:, 1:])
    np.save("nan.npy", np.where(np.eye(QUERIES, DIM) == 1, np.nan, bank))
    np.save("empty.npy", bank[:0])
    np.savez("two.npz", past=bank, new=bank)
    client = connect(URI, create=True)
    for name in ("products", "songs", "books"):
        plain_collection(client, name, rows, "COSINE")
    store = MilvusStore(client)
    migrate(
        store,
        plan_correction(store, "songs", Recipe(QueryBank(bank), estimator=NNN(8))),
        no_writers=True,
    )
    with pytest.raises(RuntimeError):
        _break_off(store, bank)
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    for field in ("image", "text"):
        schema.add_field(field, DataType.FLOAT_VECTOR, dim=DIM)
    client.create_collection("photos", schema=schema)
    yield store
    os.chdir(former)
    client.close()
    server_manager_instance.release_server(str(folder / URI))


def _break_off(store, bank):
    """Begin a migration of books, and fail while it copies."""

    def fail(doing, done, total):
        if doing == "copying":
            raise RuntimeError

    migrate(
        store,
        plan_correction(store, "books", Recipe(QueryBank(bank), estimator=NNN(8))),
        progress=fail,
    )


@pytest.fixture
def command(shop, monkeypatch, capsys):
    """Run a command line, and return its exit code and what it prints on standard error."""
    on_terminate = signal.getsignal(signal.SIGTERM)

    def command(line, **environment):
        for name, value in {"MILVUS_HUBNESS_URI": URI, "COLUMNS": "200", **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["milvus-hubness", *line.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    yield command
    signal.signal(signal.SIGTERM, on_terminate)


README = '(see "Where do I get reference queries?" in the README)'
COMMANDS = {
    "status nowhere": "no collection or alias 'nowhere'",
    "refresh products": "collection 'products' is not corrected: migrate or enable it first",
    "refresh songs_hubness --field nope": (
        "'songs_hubness' has no float vector field 'nope': choose one of vector"
    ),
    "refresh songs_hubness --profile image": f"no profile 'image': pass --bank FILE to add it {README}",
    "disable songs_hubness": "'songs_hubness' has its biases in its vectors: undo that with migrate rollback",
    "disable products": "'products' is not corrected: there is nothing to disable",
    "bank sample songs_hubness --rate 2": "rate should be less than or equal to 1, not 2.0",
    "tune products": f"'products' is not corrected and has no bank: pass --bank FILE {README}",
    "check products --queries bank.npy": f"'products' is not corrected and has no bank: pass --bank FILE {README}",
    "hubs products --row 7": f"'products' is not corrected: pass --bank FILE {README}",
    "hubs songs_hubness --query-text text": (
        "Invalid value: --query-text needs --row, --query or --query-number, whose texts it shows"
    ),
    "hubs songs_hubness --row 7 --suspicious": "Invalid value: give --row or --suspicious, not both",
    "hubs songs_hubness --row 700": "'songs_hubness' has no row with the key '700' and a valid vector: check the key",
    "hubs songs_hubness --row 7 --query-text text": (
        "the stored bank has no texts: pass --bank FILE, the file that it was read from"
    ),
    "hubs songs_hubness --query-number 40": "no query 40: choose one from 0 to 39 with --query-number",
    "hubs songs_hubness --query narrow.npy": (
        "the field has dimension 8; the bank from narrow.npy has 7: embed both with one model"
    ),
    "enable songs__bank --bank bank.npy": "'songs__bank' is a query bank: name the collection of the items",
    "enable products --bank bank.npy --max-miss-rate 2": "max_miss_rate must be between 0 and 1, not 2.0",
    "migrate run --plan products": f"Invalid value: no reference queries: pass --bank FILE {README}",
    "migrate run --plan photos --bank bank.npy": (
        "'photos' has several vector fields: choose one with --field: image, text"
    ),
    "migrate run --plan products --bank narrow.npy": (
        "the field has dimension 8; the bank from narrow.npy has 7: embed both with one model"
    ),
    "migrate run --plan products --bank nan.npy": (
        "the bank from nan.npy has NaN, infinity or a number beyond float32: remove row 0, 1, 2, 3, 4 and 3 more"
    ),
    "migrate run --plan products --bank empty.npy": "the bank from empty.npy has no query; at least 1 is needed",
    "migrate run --plan products --bank two.npz": (
        "two.npz has several arrays: choose one of 'past', 'new', of a bank with --bank-column, or name it 'query'"
    ),
    "migrate run --plan products --bank missing.npy": "missing.npy: no such file; check the path",
    "migrate run --plan products --bank bank.npy --param k=41": (
        "the bank from bank.npy has 40 queries; at least 41 are needed"
    ),
    "migrate run --plan products --bank bank.npy --method is --param tau=0": "tau must be above 0, not 0.0",
    "migrate run --plan products --bank bank.npy --method blend --param k=8": (
        "Blend has no parameter 'k': use one of estimators, weights, strength, agreement"
    ),
    "migrate run --plan products --bank bank.npy --method dualis": (
        "DualInvertedSoftmax needs reference items: pass target_bank= (--target-bank)"
    ),
    "migrate rollback products": ("no migration of 'products' in this database"),
    "migrate run books --bank bank.npy --param k=8 --gate 1": (
        "'books_hubness' is an unfinished copy of 'books' that was started with other options "
        "(gate: None then, 1 now): repeat them, or use --restart, which drops it first"
    ),
    "migrate cutover songs": "Invalid value: no name to move to the copy: pass --alias or --rename",
    "migrate clean songs --drop songs": (
        "the migration of 'songs' to 'songs_hubness' is 'verified': "
        "dropping the source needs it to be 'switched' or 'finished'"
    ),
    "proxy --upstream nowhere": "the upstream must be HOST:PORT, not 'nowhere'",
}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_says_what_is_wrong_and_what_to_do(command, line):
    code, complaint = command(line)
    message = complaint.splitlines()[-1].removeprefix("Error: ").removeprefix("milvus-hubness: ")
    assert (code in (1, 2), message) == (True, COMMANDS[line])


ROW = {"id": 900, "vector": np.ones(DIM), "group": 0}
CALLS = {
    "a zero vector has no direction under COSINE: remove row 0": lambda client: client.insert(
        "songs_hubness", [{**ROW, "vector": np.zeros(DIM)}]
    ),
    "vectors must be finite: NaN or infinity in row 0": lambda client: client.insert(
        "songs_hubness", [{**ROW, "vector": np.full(DIM, np.nan)}]
    ),
    "vectors must have 8 dimensions, got 7": lambda client: client.search(
        "songs_hubness", [np.ones(7)]
    ),
    "no profile 'image' for field 'vector': choose one of default": lambda client: client.search(
        "songs_hubness", [np.ones(DIM)], profile="image"
    ),
    "strength must be a finite number, not nan": lambda client: client.search(
        "songs_hubness", [np.ones(DIM)], strength=float("nan")
    ),
    "candidates needs a re-ranker: pass one as rerank": lambda client: client.search(
        "songs_hubness", [np.ones(DIM)], candidates=5
    ),
    "metric is one of IP, COSINE, L2, not 'HAMMING'": lambda _: Layout(DIM, "HAMMING"),
    "k must be a whole number of at least 1, not 0": lambda _: NNN(0),
    "weights must not be negative and have the sum 1, not (2.0,)": lambda _: Blend((NNN(3),), (2,)),
    "the bank from array has 3 queries; at least 50 are needed": lambda _: NNN(50).fit(
        np.ones((3, DIM))
    ),
}


@pytest.mark.parametrize("message", CALLS)
def test_a_call_says_what_is_wrong_and_what_to_do(shop, message):
    client = HubnessClient(URI)
    with pytest.raises(HubnessError) as refused:
        CALLS[message](client)
    assert (getattr(refused.value, "message", None) or str(refused.value)) == message


def test_the_holder_of_a_lease_is_named(shop, command):
    with Lease(shop, "songs_hubness"):
        code, complaint = command("refresh songs_hubness")
    pattern = (
        r"milvus-hubness: process \d+ on \S+ holds the lease on 'songs_hubness' \(token \d+, until "
        r"\d\d:\d\d:\d\d UTC unless renewed\): wait until it ends, or stop it\n"
    )
    assert (code, bool(re.fullmatch(pattern, complaint))) == (1, True), complaint


def test_each_fault_of_a_configuration_has_a_line(command):
    Path("hubness.toml").write_text(
        '[[collection]]\nname = "songs_hubness"\nrefesh = "60s"\nfill = "soon"\n'
        'bank_column = "embedding"\n[server]\ntoken = "x"\nport = 3\n'
    )
    code, complaint = command("serve --config hubness.toml --check")
    assert (code, complaint.splitlines()) == (
        2,
        [
            "hubness.toml: server.token: secrets are not allowed here: name a token_file, or set "
            "$MILVUS_HUBNESS_TOKEN",
            "hubness.toml: server.port: unknown key; allowed keys: uri, token_file, ca, cert, key",
            "hubness.toml: collection[0].bank_column: needs a bank: add the key bank, or remove this one",
            'hubness.toml: collection[0].fill: \'soon\' is neither an interval, such as "60s", "5m", '
            '"2h" or "1d", nor the five fields of cron, such as "30 4 * * *": minute, hour, day of the '
            "month, month, weekday",
            "hubness.toml: collection[0].refesh: unknown key, did you mean 'refresh'?",
        ],
    )
