"""The user's shell commands see no secrets and tell none."""

import threading
import time

import pytest

from milvus_hubness import errors
from milvus_hubness.errors import redacted
from milvus_hubness.jobs.common.shell_commands import run_command

TOKEN = "root:s3cr3t"


@pytest.mark.parametrize("name", ["MILVUS_HUBNESS_TOKEN", "MILVUS_TOKEN"])
def test_the_token_stays_out_of_the_environment_and_the_output(monkeypatch, tmp_path, name):
    monkeypatch.setenv(name, TOKEN)
    monkeypatch.setenv("DSN", f"milvus://{TOKEN}@host")
    monkeypatch.setenv("KEPT", "kept")
    outcome = run_command(
        f"echo > {tmp_path}/env; env >> {tmp_path}/env; echo using {TOKEN} >&2; exit 3"
    )
    environment = (tmp_path / "env").read_text()
    assert TOKEN not in environment
    assert f"\n{name}=" not in environment
    assert "KEPT=kept" in environment
    assert (outcome.exit_code, outcome.last_line) == (3, "using ***")
    assert outcome.complaint == "exit code 3: using ***"


def test_secrets_that_are_remembered_stay_out_too(monkeypatch, tmp_path):
    monkeypatch.setenv("PASSWORD", "pässword")
    errors.remember_secrets("pässword", "")
    outcome = run_command(f"env > {tmp_path}/env; echo pässword")
    assert "PASSWORD" not in (tmp_path / "env").read_text()
    assert outcome.last_line == "***"


def test_a_secret_is_found_within_json():
    assert redacted('{"uri": "a\\"b\\\\c"}', ['a"b\\c']) == '{"uri": "***"}'


def test_the_last_line_is_that_of_standard_error_where_there_is_one():
    assert run_command("echo out; echo no >&2; echo; exit 1").last_line == "no"
    assert run_command("echo first; echo last; echo").last_line == "last"
    assert run_command("true").last_line == ""


def test_a_flood_of_output_is_no_trouble():
    assert run_command("head -c 3000000 /dev/zero | tr '\\0' x; echo; echo end").last_line == "end"


def test_a_command_that_takes_too_long_is_killed_with_all_it_started(tmp_path):
    began = time.monotonic()
    outcome = run_command(f"(sleep 1; touch {tmp_path}/late) & sleep 30 | cat", timeout=0.1)
    assert time.monotonic() - began < 5
    assert outcome.exit_code is None
    assert outcome.complaint == "did not end in time"
    time.sleep(1.1)
    assert not (tmp_path / "late").exists()


def test_what_a_command_leaves_in_the_background_is_not_waited_for():
    began = time.monotonic()
    assert run_command("sleep 10 & exit 0").exit_code == 0
    assert time.monotonic() - began < 5


def test_a_wait_can_be_called_off():
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    began = time.monotonic()
    assert run_command("sleep 30", cancelled=cancelled).exit_code is None
    assert time.monotonic() - began < 5
