"""The password of an address, and tokens, in what the commands print when no database answers."""

import json

import numpy as np
import pytest

from milvus_hubness.cli import console, options
from tests.cli.conftest import DIM, assert_fails

PASSWORD = "Pa55-of-commands"
URI = f"http://root:{PASSWORD}@127.0.0.1:1"
BANK = "--bank bank.npy"

COMMANDS = {
    "status": "status products",
    "refresh": "refresh products",
    "refresh with a bank": f"refresh products {BANK}",
    "enable": f"enable products {BANK}",
    "disable": "disable products",
    "bank": "bank export products queries.npz",
    "tune": f"tune products {BANK}",
    "check": f"check products {BANK}",
    "migrate plan": f"migrate run --plan products {BANK}",
    "migrate rehearse": f"migrate run --rehearse products {BANK}",
    "migrate run": f"migrate run products {BANK} --no-writers",
    "migrate status": "migrate status products",
    "migrate verify": "migrate verify products",
    "migrate cutover": "migrate cutover products --rename",
    "migrate rollback": "migrate rollback products",
    "migrate clean": "migrate clean products --drop products",
    "demo": f"demo --uri {URI}",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("bank.npy", np.ones((20, DIM), np.float32))
    return tmp_path


@pytest.mark.parametrize("option", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_command_prints_the_password_of_the_address(run, folder, command, option):
    done = run(*command.split(), *option, uri=URI, MILVUS_HUBNESS_TOKEN="t0ken-of-commands")
    assert PASSWORD not in done.stdout + done.stderr
    assert "t0ken" not in done.stdout + done.stderr
    assert_fails(done, 1, "no Milvus answers at http://***@127.0.0.1:1")
    if option:
        assert json.loads(done.stdout)["error"]["type"] == "ServerUnavailable"


@pytest.mark.parametrize("option", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("mode", [[], ["--check"], ["--once"]], ids=["serve", "check", "once"])
def test_serve_refuses_an_address_with_a_password_and_does_not_print_it(run, folder, mode, option):
    (folder / "hubness.toml").write_text('[[collection]]\nname = "products"\n')
    done = run("serve", "--config", "hubness.toml", *mode, *option, uri=URI)
    assert PASSWORD not in done.stdout + done.stderr
    assert_fails(done, 2, "holds a user or a password")


@pytest.mark.parametrize("option", [[], ["--json"]], ids=["text", "json"])
def test_the_proxy_does_not_print_the_password_of_an_upstream_that_it_refuses(run, folder, option):
    done = run("proxy", "--upstream", f"root:{PASSWORD}@127.0.0.1", *option)
    assert PASSWORD not in done.stdout + done.stderr
    assert_fails(done, 2, "***@127.0.0.1")


@pytest.mark.parametrize("option", [[], ["--json"]], ids=["text", "json"])
def test_the_traceback_of_an_unexpected_error_holds_no_secret(run, folder, monkeypatch, option):
    def fails(*connection):
        try:
            raise ValueError(f"cause: {URI} t0ken-of-commands")
        except ValueError as error:
            raise RuntimeError(f"cannot use {URI}") from error

    monkeypatch.setattr(options, "open_store", fails)
    monkeypatch.setenv("MILVUS_HUBNESS_TOKEN", "t0ken-of-commands")
    done = run("status", "products", *option, uri=URI)
    assert done.returncode == 1
    assert PASSWORD not in done.stdout + done.stderr
    assert "t0ken" not in done.stdout + done.stderr
    assert "ValueError: cause: http://***@127.0.0.1:1 ***" in done.stderr
    assert "RuntimeError: cannot use http://***@127.0.0.1:1" in done.stderr
    if option:
        assert json.loads(done.stdout)["error"]["message"] == "cannot use http://***@127.0.0.1:1"


def test_in_a_process_of_its_own_it_is_one_line(started):
    process = started("status", "products", MILVUS_HUBNESS_URI=URI)
    printed, complained = process.communicate(timeout=60)
    assert (process.returncode, printed) == (1, "")
    [line] = complained.splitlines()
    assert line.startswith("milvus-hubness: no Milvus answers at http://***@127.0.0.1:1")
    assert PASSWORD not in line


def test_facts_are_redacted(capsys):
    console.show_facts("shop", {"address": URI})
    assert PASSWORD not in capsys.readouterr().out
