"""Files get their names when they are whole; links, pipes and devices stay what they are."""

import os
import stat
from pathlib import Path

import pytest

from milvus_hubness.basics.files.writing import (
    check_writable,
    expect_different,
    unfinished_file,
    whole_file,
)
from milvus_hubness.errors import InvalidParameter, UnreadableFile


def write(path, text="new\n"):
    with whole_file(path) as file:
        file.write(text)


def write_half(path):
    former = path.read_text() if path.exists() else None
    with whole_file(path) as file:
        file.write("half")
        file.flush()
        assert (path.read_text() if path.exists() else None) == former
        raise KeyError


def test_a_file_is_there_as_a_whole_or_as_it_was(tmp_path):
    path = tmp_path / "run.trec"
    with pytest.raises(KeyError):
        write_half(path)
    assert os.listdir(tmp_path) == []

    path.write_text("former")
    path.chmod(0o640)
    with pytest.raises(KeyError):
        write_half(path)
    assert path.read_text() == "former"
    write(path)
    assert path.read_bytes() == b"new\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["run.trec"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "run.trec"
    link = tmp_path / "link.trec"
    link.symlink_to(target)
    write(link)
    assert link.is_symlink()
    assert target.read_text() == "new\n"
    assert os.listdir(tmp_path / "elsewhere") == ["run.trec"]


def test_pipes_and_devices_are_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UnreadableFile, match=r"cannot write .*pipe: No such device"):
        write(pipe)
    # Opened for both, so that the writer has a reader at once.
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    write(pipe)
    assert os.read(reader, 100) == b"new\n"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    write(Path("/dev/null"))
    assert not os.path.isfile("/dev/null")


def test_a_long_name_and_a_missing_folder(tmp_path):
    path = tmp_path / ("é" * 120 + ".trec")
    write(path)
    assert path.read_text() == "new\n"
    with pytest.raises(UnreadableFile, match=r"cannot write .*/missing/run\.trec: No such file"):
        write(tmp_path / "missing" / "run.trec")


def test_one_file_by_two_names_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.trec"
    expect_different([("--a", path), ("--b", tmp_path / "other.trec")])
    (tmp_path / "link.trec").symlink_to(path)
    for other in ("run.trec", "./x/../run.trec", "link.trec"):
        with pytest.raises(InvalidParameter, match="--a and --b would be the same file"):
            expect_different([("--a", path), ("--b", Path(other))])
    expect_different([("--a", Path("/dev/null")), ("--b", Path("/dev/null"))])


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_no_link_that_others_put_in_the_folder_is_followed(tmp_path, monkeypatch):
    """Even where somebody guesses the name of the unfinished file."""
    path = tmp_path / "run.trec"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    drawn = iter(["guessed", "guessed"])
    monkeypatch.setattr("secrets.token_hex", lambda count: next(drawn))
    (tmp_path / ".run.trec.guessed").symlink_to(victim)
    for write_to in (write, write_by_name):
        with pytest.raises((UnreadableFile, FileExistsError), match="File exists"):
            write_to(path)
    assert victim.read_text() == "precious"
    assert not path.exists()

    monkeypatch.undo()
    for former in (f".run.trec.{os.getpid()}", "run.trec.partial", "run.unfinished"):
        (tmp_path / former).symlink_to(victim)
    for write_to in (write, write_by_name):
        write_to(path)
        assert path.read_text() == "new\n"
        path.unlink()
    assert victim.read_text() == "precious"


def write_by_name(path):
    with unfinished_file(path) as unfinished:
        unfinished.write_text("new\n")


def test_who_may_read_a_file(tmp_path):
    """A private file is so from its first byte on, and a file that is replaced keeps its mode."""
    former = os.umask(0o022)
    try:
        path = tmp_path / "queries.npy"
        with whole_file(path, is_private=True):
            [unfinished] = tmp_path.iterdir()
            assert mode_of(unfinished) == 0o600
        assert mode_of(path) == 0o600
        path.chmod(0o640)
        with whole_file(path):
            [unfinished] = set(tmp_path.iterdir()) - {path}
            assert mode_of(unfinished) == 0o640
        assert mode_of(path) == 0o640
        write(tmp_path / "run.trec")
        assert mode_of(tmp_path / "run.trec") == 0o644
    finally:
        os.umask(former)


def test_a_look_at_a_dead_link_leaves_it_as_it_is(tmp_path):
    link = tmp_path / "link.trec"
    link.symlink_to(tmp_path / "run.trec")
    check_writable(link)
    assert link.is_symlink()
    assert os.listdir(tmp_path) == ["link.trec"]
