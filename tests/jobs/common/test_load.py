"""A migration that watches the load of the server."""

import threading
import time

import pytest

from milvus_hubness.errors import CriticalLoad
from milvus_hubness.jobs.common.progress import Events, Throttle
from milvus_hubness.jobs.common.shell_commands import watching_load

EVERY = 0.05


def until(holds):
    ends_at = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < ends_at, "it never came to that"
        time.sleep(0.01)


@pytest.fixture
def heard():
    return []


@pytest.fixture
def watch(heard):
    throttle = Throttle()

    def watch(**commands):
        watch.throttle = throttle
        return watching_load(throttle, Events([heard.append]), every=EVERY, **commands)

    return watch


def test_copying_rests_while_the_load_is_too_high(watch, heard, tmp_path):
    quiet = tmp_path / "quiet"
    command = f"test -e {quiet} || {{ echo load is 97; exit 4; }}"
    with watch(max_load=command):
        assert watch.throttle.snapshot()["paused_by"] == ["max-load"]
        quiet.touch()
        until(lambda: watch.throttle.snapshot()["running"])
        quiet.unlink()
        until(lambda: not watch.throttle.snapshot()["running"])
        quiet.touch()
        watch.throttle.admit(1, 1)
    assert [event.name for event in heard] == ["throttled", "resumed"] * 2
    assert heard[0].facts == {"reason": "max-load", "detail": "exit code 4: load is 97"}


def test_a_critical_load_stops_the_migration(watch, heard, monkeypatch):
    monkeypatch.setenv("MILVUS_TOKEN", "s3cr3t")
    with (
        watch(critical_load="echo 'disk full, s3cr3t' >&2; exit 9", max_load="true"),
        pytest.raises(CriticalLoad) as raised,
    ):
        watch.throttle.admit(1, 1)
    assert "exit code 9: disk full, ***" in str(raised.value)
    assert "s3cr3t" not in str(raised.value)


def test_a_critical_load_that_comes_later_wakes_who_waits(watch, tmp_path):
    full = tmp_path / "full"
    with watch(critical_load=f"test ! -e {full}"):
        watch.throttle.admit(1, 1)
        watch.throttle.pause("http")
        threading.Timer(0.1, full.touch).start()
        with pytest.raises(CriticalLoad, match="exit code 1"):
            watch.throttle.admit(1, 1)


def test_nothing_is_left_when_the_migration_is_over(watch, heard, tmp_path):
    slow = tmp_path / "slow"
    before = threading.active_count()
    with watch(max_load=f"test ! -e {slow} || {{ touch {tmp_path}/begun; sleep 30; }}"):
        slow.touch()
        until((tmp_path / "begun").exists)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert threading.active_count() == before
    assert watch.throttle.snapshot()["running"]
    assert heard == []


def test_a_listener_that_fails_does_not_end_the_watch_unnoticed(tmp_path):
    def refuse(event):
        raise OSError("no space for the log")

    throttle, busy = Throttle(), tmp_path / "busy"
    with watching_load(throttle, Events([refuse]), max_load=f"test ! -e {busy}", every=EVERY):
        busy.touch()
        until(lambda: throttle.snapshot()["stopped"])
        with pytest.raises(OSError, match="no space for the log"):
            throttle.admit(1, 1)
