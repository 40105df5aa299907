"""A running migration steered through a file."""

import json
import os
import threading
import time

import pytest

from milvus_hubness.errors import UnreadableFile
from milvus_hubness.jobs.common.control_file import following_control_file, postpone_cutover
from milvus_hubness.jobs.common.progress import Events, Throttle


class Migration:
    """What the job holds while it runs."""

    def __init__(self):
        self.heard = []
        self.events = Events([self.heard.append])
        self.throttle, self.release = Throttle(), threading.Event()

    def file(self, path):
        return following_control_file(
            path, self.throttle, self.release, self.events, poll_seconds=0.02
        )

    @property
    def is_paused(self):
        return bool(self.throttle.snapshot()["paused_by"])

    def told(self):
        return [event.name for event in self.heard]


@pytest.fixture
def migration():
    return Migration()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "control.json"


def write_control(path, **changes):
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.with_suffix(".new").write_text(json.dumps({**settings, **changes}))
    path.with_suffix(".new").replace(path)


def until(holds):
    ends_at = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < ends_at, "it never came to that"
        time.sleep(0.01)


def test_a_file_steers_from_the_beginning_and_when_it_changes(migration, path):
    path.write_text('{"paused": true, "rows_per_second": 500}')
    with migration.file(path):
        now = migration.throttle.snapshot()
        assert (now["paused_by"], now["rows_per_second"]) == (["the control file"], 500)
        write_control(path, paused=False, chunk_seconds=1.5, cutover="now")
        until(lambda: not migration.is_paused)
        now = migration.throttle.snapshot()
        assert (now["rows_per_second"], now["chunk_seconds"]) == (500, 1.5)
        assert migration.release.is_set()
        write_control(path, rows_per_second=None, cutover="postponed")
        until(lambda: migration.throttle.snapshot()["rows_per_second"] is None)
        assert not migration.release.is_set()
    assert migration.told() == ["rate", "paused", "rate", "resumed", "rate"]


def test_a_file_that_comes_later_or_goes_is_fine(migration, path):
    with migration.file(path):
        write_control(path, paused=True)
        until(lambda: migration.is_paused)
        path.unlink()
        time.sleep(0.08)
        assert migration.is_paused
    assert migration.told() == ["paused"]


@pytest.mark.parametrize(
    "broken",
    [
        '{"paused": fal',
        "[1]",
        '{"paused": "yes"}',
        '{"rows_per_second": -1, "paused": true}',
        '{"rows_per_minute": 3}',
        '{"cutover": "soon"}',
        '{"rows_per_second": ' + "9" * 5_000 + "}",
        "[" * 60_000,
        "",
        b"\xff\xfe\xfd",
    ],
    ids=lambda broken: str(broken[:20]),
)
def test_a_broken_file_is_warned_of_once_and_changes_nothing(migration, path, broken):
    path.write_text('{"rows_per_second": 7}')
    with migration.file(path):
        path.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
        until(lambda: "warning" in migration.told())
        time.sleep(0.1)
        assert migration.told() == ["rate", "warning"]
        assert migration.throttle.snapshot()["rows_per_second"] == 7
        assert not migration.is_paused
        message = migration.heard[-1].facts["message"]
        assert message.startswith(f"{path}: ")
        assert message.endswith("; nothing changes until the file is corrected")
        path.write_text('{"rows_per_second": 8}')
        until(lambda: migration.throttle.snapshot()["rows_per_second"] == 8)


def test_a_file_that_is_half_written_at_a_look_is_not_warned_of(migration, path):
    """As `echo` writes it: first empty, then whole."""
    with following_control_file(
        path, migration.throttle, migration.release, migration.events, poll_seconds=0.3
    ):
        path.write_text('{"pau')
        time.sleep(0.4)
        path.write_text('{"paused": true}')
        until(lambda: migration.is_paused)
    assert migration.told() == ["paused"]


def test_each_new_fault_is_warned_of(migration, path):
    with migration.file(path):
        for count, broken in enumerate(['{"pace": 1}', "{", '{"pace": 1}'], 1):
            path.write_text(broken)
            until(lambda count=count: len(migration.told()) == count)
        path.write_text('{"rows_per_second": 5}')
        until(lambda: migration.throttle.snapshot()["rows_per_second"] == 5)
        path.write_text('{"pace": 1}')
        until(lambda: migration.told().count("warning") == 4)
    messages = [event.facts["message"] for event in migration.heard if event.name == "warning"]
    assert messages[0] == messages[2] == messages[3]
    assert "'pace' is not one of paused, rows_per_second" in messages[0]
    assert "is not JSON" in messages[1]


def test_a_pipe_is_not_waited_for(migration, path):
    os.mkfifo(path)
    with migration.file(path):
        until(lambda: migration.told() == ["warning"])
    assert "is a pipe: name a file" in migration.heard[0].facts["message"]


def test_a_pause_holds_the_writer(migration, path):
    write_control(path, paused=True)
    with migration.file(path):
        admitted = threading.Event()
        writer = threading.Thread(target=lambda: (migration.throttle.admit(1), admitted.set()))
        writer.start()
        assert not admitted.wait(0.05)
        write_control(path, paused=False)
        assert admitted.wait(10)
        writer.join()
    assert migration.told() == ["paused", "resumed"]


def test_it_does_not_resume_what_another_has_paused(migration, path):
    migration.throttle.pause("the question at the terminal")
    write_control(path, paused=True)
    with migration.file(path):
        write_control(path, paused=False)
        until(lambda: migration.told() == ["paused", "resumed"])
    assert migration.throttle.snapshot()["paused_by"] == ["the question at the terminal"]


def test_a_change_of_one_setting_reports_no_other(migration, path):
    write_control(path, rows_per_second=100, paused=True)
    with migration.file(path):
        write_control(path, paused=False)
        until(lambda: not migration.is_paused)
    assert migration.told() == ["rate", "paused", "resumed"]
    assert migration.heard[0].facts == {
        "rows_per_second": 100,
        "chunk_seconds": None,
    }


def test_a_listener_that_fails_ends_the_run(migration, path):
    """Otherwise a pause would last for ever, as nobody reads the file any more."""

    def refuse(event):
        raise OSError("nobody reads the events")

    migration.events = Events([refuse])
    with migration.file(path):
        write_control(path, paused=True)
        with pytest.raises(OSError, match="nobody reads the events"):
            until(lambda: migration.throttle.check())


def test_a_release_of_an_earlier_run_is_taken_back(path):
    postpone_cutover(path)
    assert not path.exists()
    path.write_text('{"cutover": "now", "rows_per_second": 5}')
    postpone_cutover(path)
    assert json.loads(path.read_text()) == {"cutover": "postponed", "rows_per_second": 5}
    path.write_text("{")
    with pytest.raises(UnreadableFile, match="not JSON"):
        postpone_cutover(path)
