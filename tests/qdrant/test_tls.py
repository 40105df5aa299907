"""A Qdrant behind TLS, with an authority of its own and certificates of clients, as `test_tls.py` of the commands."""

import json

import pytest
from qdrant_client import models

from milvus_hubness.basics.defaults import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from tests.qdrant.strict import StrictServer
from tests.qdrant.strict.listening import listening
from tests.support.tls import Authority, Terminator


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("wants", [False, True], ids=["own authority", "certificates of clients"])
def test_a_command_reaches_it(authority, command, wants):
    server = StrictServer()
    config = models.VectorParams(size=4, distance="Cosine")
    server.client().create_collection("items", vectors_config=config)
    key, cert = authority.sign("client")
    with listening(server) as uri:
        before = Terminator(
            uri.removeprefix("http://"),
            *authority.sign("qdrant"),
            clients_of=authority.file if wants else None,
            protocol="http/1.1",
        )
        words = ["status", "items", "--json", "--uri", f"qdrant+https://{before.address}"]
        trusted = {CA_VARIABLE: str(authority.file)}
        shown = {CERT_VARIABLE: str(cert), KEY_VARIABLE: str(key)} if wants else {}

        done = command(*words, env=trusted | shown)
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["status"]["corrected"] is False

        refused = command(*words, env=trusted) if wants else command(*words)
        assert refused.exit_code == 1
        assert str(refused.exception).startswith("no Qdrant answers at https://localhost:")
        assert wants or "certificate verify failed" in str(refused.exception)
        before.stop()
