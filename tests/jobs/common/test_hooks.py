"""Commands at the steps of a migration: what they are told, and what their failure does."""

import json
import logging
import os
import threading
import time

import pytest

from milvus_hubness.errors import HookFailed, InvalidParameter
from milvus_hubness.jobs.common.progress import EVENT_NAMES, Events
from milvus_hubness.jobs.common.shell_commands import Hooks, parse_hooks

TOKEN = "root:s3cr3t"


def variables(path):
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)


def test_a_hook_finds_the_facts_in_its_environment_and_not_the_token(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("MILVUS_HUBNESS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MILVUS_HUBNESS_TOKEN", TOKEN)
    monkeypatch.setenv("MILVUS_TOKEN", TOKEN)
    monkeypatch.setenv("OTHER", f"Bearer {TOKEN}")
    hooks = Hooks({"copying": [f"env > {tmp_path}/env"]})
    Events([], hooks).report(
        "copying",
        partition=None,
        source="products",
        rows=1_000,
        rows_per_second=12.5,
        keys=["a", 2],
        token=TOKEN,
        uri=f"http://{TOKEN}@host",
    )
    environment = variables(tmp_path / "env")
    told = {
        name: value for name, value in environment.items() if name.startswith("MILVUS_HUBNESS_")
    }
    assert TOKEN not in (tmp_path / "env").read_text()
    assert "OTHER" not in environment
    assert json.loads(told.pop("MILVUS_HUBNESS_KEYS")) == ["a", 2]
    assert {name: told[name] for name in told if name != "MILVUS_HUBNESS_DB"} == {
        "MILVUS_HUBNESS_EVENT": "copying",
        "MILVUS_HUBNESS_PARTITION": "",
        "MILVUS_HUBNESS_SOURCE": "products",
        "MILVUS_HUBNESS_ROWS": "1000",
        "MILVUS_HUBNESS_ROWS_PER_SECOND": "12.5",
        "MILVUS_HUBNESS_URI": "http://***@host",
    }


def test_hooks_run_for_their_event_alone_and_in_their_order(tmp_path):
    log = tmp_path / "log"
    events = Events([], Hooks({"after-copy": [f"echo 1 >> {log}", f"echo 2 >> {log}"]}))
    events.report("before-copy")
    assert not log.exists()
    events.report("after-copy")
    assert log.read_text().split() == ["1", "2"]


def test_a_failing_hook_before_a_step_stops_the_migration(monkeypatch, tmp_path):
    monkeypatch.setenv("MILVUS_HUBNESS_TOKEN", TOKEN)
    command = f"echo {TOKEN} is no good >&2; exit 7"
    events = Events([], Hooks({"before-cutover": [command, f"touch {tmp_path}/second"]}))
    with pytest.raises(HookFailed) as raised:
        events.report("before-cutover")
    assert "before-cutover" in str(raised.value)
    assert "exit code 7: *** is no good" in str(raised.value)
    assert TOKEN not in str(raised.value)
    assert not (tmp_path / "second").exists()


def test_a_failing_hook_after_a_step_is_warned_of_and_the_next_runs(tmp_path, caplog):
    hooks = Hooks({"after-copy": ["echo broken >&2; exit 1", f"touch {tmp_path}/second"]})
    with caplog.at_level(logging.WARNING, "milvus_hubness"):
        Events([], hooks).report("after-copy")
    [record] = caplog.records
    assert record.name == "milvus_hubness"
    assert "after-copy" in record.getMessage()
    assert "exit code 1: broken" in record.getMessage()
    assert (tmp_path / "second").exists()


def test_a_hook_that_is_cancelled_has_failed():
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(HookFailed, match="did not end in time"):
        Events([], Hooks({"before-copy": ["sleep 30"]}, cancelled=cancelled)).report("before-copy")


def test_hooks_are_read_from_their_specs():
    assert parse_hooks(["before-copy=a x=1", "before-copy = b", "failed=mail me"]) == {
        "before-copy": ["a x=1", "b"],
        "failed": ["mail me"],
    }


@pytest.mark.parametrize("spec", ["befor-copy=x", "=x"])
def test_a_hook_on_no_event_is_refused_with_those_there_are(spec):
    with pytest.raises(InvalidParameter) as raised:
        Hooks(parse_hooks([spec]))
    assert all(name in str(raised.value) for name in EVENT_NAMES)


@pytest.mark.parametrize("spec", ["before-copy", "before-copy=", "before-copy= "])
def test_a_hook_without_a_command_is_refused(spec):
    with pytest.raises(InvalidParameter, match="EVENT=COMMAND"):
        parse_hooks([spec])


def test_a_hook_that_hangs_ends_when_the_migration_is_stopped(tmp_path):
    stopped = threading.Event()
    hooks = Hooks(
        {"copying": [f"touch {tmp_path}/began; sleep 60; touch {tmp_path}/ended"]},
        cancelled=stopped,
    )
    reporting_failures = threading.Thread(target=Events([], hooks).report, args=["copying"])
    reporting_failures.start()
    while not (tmp_path / "began").exists():
        time.sleep(0.01)
    stopped.set()
    reporting_failures.join(10)
    assert not reporting_failures.is_alive()
    assert not (tmp_path / "ended").exists()
