"""The password of an address, and the key, in what is printed when no Qdrant answers."""

import json
import sys

import numpy as np
import pytest

from milvus_hubness import ServerUnavailable, cli
from qdrant_hubness.store import connect

PASSWORD, KEY = "Pa55-of-qdrant", "k3y-of-qdrant"
URI = f"http://root:{PASSWORD}@127.0.0.1:1"


@pytest.mark.parametrize(
    "uri", [URI, f"http://root:{PASSWORD}@127.0.0.1:x", f"http://root:/{PASSWORD}@host"]
)
def test_connect_names_the_address_without_the_password(uri):
    with pytest.raises(ServerUnavailable) as raised:
        connect(uri, KEY, timeout=1)
    assert "http://***@" in str(raised.value)
    seen = raised.value
    while seen is not None:
        assert PASSWORD not in str(seen) + repr(seen)
        assert KEY not in str(seen) + repr(seen)
        seen = seen.__cause__ or seen.__context__


@pytest.mark.parametrize("option", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize(
    "command",
    [
        "status items",
        "refresh items",
        "enable items --bank bank.npy",
        "disable items",
        "migrate run items --bank bank.npy",
        "migrate rollback items",
        "migrate clean items --drop items",
        "sweep items",
    ],
)
def test_no_command_prints_the_password_of_the_address(
    tmp_path, monkeypatch, capsys, command, option
):
    monkeypatch.chdir(tmp_path)
    np.save("bank.npy", np.ones((20, 8), np.float32))
    monkeypatch.setenv("MILVUS_HUBNESS_URI", f"qdrant+{URI}")
    monkeypatch.setenv("MILVUS_HUBNESS_TOKEN", KEY)
    monkeypatch.setattr(sys, "argv", ["milvus-hubness", *command.split(), *option])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert PASSWORD not in out + err
    assert KEY not in out + err
    [line] = err.splitlines()
    assert line.startswith("milvus-hubness: no Qdrant answers at http://***@127.0.0.1:1")
    if option:
        assert json.loads(out)["error"]["type"] == "ServerUnavailable"
