"""What the tests of the commands share: a database, banks, and the command itself."""

import json
import os
import signal
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from milvus_lite.server_manager import server_manager_instance

from milvus_hubness import connect
from milvus_hubness.cli import console, main
from tests.support.galleries import plain_collection, vectors
from tests.support.terminals import Keyboard, Screen

DIM = 8


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str

    def lines(self):
        """Of an event stream."""
        return [json.loads(line) for line in self.stdout.splitlines()]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A Milvus Lite file with a collection of 60 rows, and banks of every kind, in the working folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(4)
    bank = vectors(rng, 40, DIM)
    client = connect("shop.db", create=True)
    plain_collection(client, "products", vectors(rng, 60, DIM), "COSINE")
    np.save("bank.npy", bank)
    np.savez("bank.npz", queries=bank, other=bank[:3])
    table = pa.table({"text": ["q"] * 40, "embedding": list(bank)})
    pq.write_table(table, "bank.parquet")
    with pa.OSFile("bank.arrow", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    yield tmp_path
    client.close()
    server_manager_instance.release_server("shop.db")


@pytest.fixture
def run(monkeypatch, capsys):
    """The command in this process; what it printed and how it ended."""
    on_terminate = signal.getsignal(signal.SIGTERM)

    def run(*arguments, uri="shop.db", **environment):
        monkeypatch.setenv("MILVUS_HUBNESS_URI", uri)
        monkeypatch.setenv("COLUMNS", "120")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        # A busy machine takes longer than the time after which a command prints its steps.
        monkeypatch.setattr(console.StepLines, "quiet", 3_600)
        monkeypatch.setattr(sys, "argv", ["milvus-hubness", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code or 0, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGTERM, on_terminate)


@pytest.fixture
def at_terminal(run, monkeypatch):
    """The command in this process, at what claims to be a terminal: how it ended, and the screen."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    # Who runs the tests in the background of a shell has them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def at_terminal(*arguments, replies=(), **environment):
        screen = Screen()
        with monkeypatch.context() as changed:
            changed.setattr(sys, "stdin", Keyboard(screen, replies))
            screen.stands_for_output(changed)
            ended = run(*arguments, **environment)
        return ended.returncode, screen

    yield at_terminal
    signal.signal(signal.SIGINT, on_interrupt)


@pytest.fixture
def started(files):
    """The command in a process of its own, on a larger collection, as people start it: signals are real."""
    client = connect("shop.db", create=True)
    items = vectors(np.random.default_rng(5), 3_000, DIM)
    plain_collection(client, "many", items[:1_000], "COSINE")
    # Each partition is a chunk of its own.
    for start in (1_000, 2_000):
        partition = f"from_{start}"
        client.create_partition("many", partition)
        rows = enumerate(items[start : start + 1_000], start)
        client.insert(
            "many",
            [{"id": i, "vector": item, "group": i % 5} for i, item in rows],
            partition_name=partition,
        )
    client.create_alias("many", "live")
    client.close()
    server_manager_instance.release_server("shop.db")
    processes = []

    def started(*arguments, **environment):
        process = subprocess.Popen(
            [sys.executable, "-m", "milvus_hubness", *arguments],
            env={**os.environ, "MILVUS_HUBNESS_URI": "shop.db", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def collections(folder):
    return set(connect(str(folder / "shop.db")).list_collections())


def assert_fails(done, code, *said):
    """One clear line, no traceback."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    [line] = done.stderr.strip().splitlines()
    for words in said:
        assert words in line
