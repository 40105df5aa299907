"""What servers of which version can do: older ones ignore what they do not know."""

import sys
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from pymilvus.exceptions import MilvusException

from milvus_hubness import HubnessClient, MilvusStore, connect
from milvus_hubness.basics import requirements
from milvus_hubness.basics.requirements import naming_extras
from milvus_hubness.cli import console
from milvus_hubness.errors import UnsupportedVersion
from milvus_hubness.milvus.store.server import supports


@pytest.mark.parametrize(
    ("version", "are_loaded"),
    [
        ("v2.3.5-lite", False),
        ("2.4.23", False),
        ("2.5.14", True),
        ("v10.1", True),
        ("milvus_lite-3.2.2", False),
    ],
)
def test_versions(version, are_loaded):
    assert supports(version, "load fields") == are_loaded


class NotImplementedByServer(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.UNIMPLEMENTED

    def details(self):
        return ""


def server(answer):
    """A client of a server that answers with this version, or raises it."""

    def get_server_version():
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(get_server_version=get_server_version)


@pytest.mark.parametrize("version", ["v2.2.16", "2.0.2", "1.1.1"])
def test_a_server_that_is_too_old_is_refused_in_one_line(version):
    with pytest.raises(UnsupportedVersion) as refused:
        MilvusStore(server(version))
    assert str(refused.value) == f"the server runs Milvus {version}: upgrade it to 2.3 or newer"


@pytest.mark.parametrize(
    "version", ["v2.3.5", "2.6.18-dev", "v10.0", "cbe1f2a", "master-20260101-abc", "unknown"]
)
def test_servers_that_are_new_enough_and_development_builds_are_accepted(version):
    assert MilvusStore(server(version)).server_version() == version


def test_a_server_that_does_not_know_the_request_is_refused_in_one_line():
    with pytest.raises(
        UnsupportedVersion,
        match=r"^the server does not report its version: upgrade it to Milvus 2.3",
    ):
        MilvusStore(server(NotImplementedByServer()))


@pytest.fixture
def installed(monkeypatch):
    """Have a library be of another version, as far as its metadata says."""
    versions = {}
    real = requirements.version
    monkeypatch.setattr(requirements, "version", lambda name: versions.get(name) or real(name))
    return versions.__setitem__


OLD_LITE = (
    "milvus-lite 2.5.1 is installed, which cannot store the state of a correction: "
    'pip install "milvus-lite>=3.1"'
)


@pytest.mark.parametrize("opener", [connect, HubnessClient], ids=["connect", "HubnessClient"])
def test_a_milvus_lite_that_is_too_old_is_refused_before_it_writes_a_file(
    installed, tmp_path, opener
):
    """2.5.1 answers UNIMPLEMENTED in the middle of a job; 3.0 forgets the properties of collections."""
    installed("milvus-lite", "2.5.1")
    with pytest.raises(UnsupportedVersion) as refused:
        opener(str(tmp_path / "shop.db"))
    assert (getattr(refused.value, "message", None) or str(refused.value)) == OLD_LITE
    assert isinstance(refused.value, MilvusException) == (opener is HubnessClient)
    assert not (tmp_path / "shop.db").exists()
    installed("milvus-lite", "3.0")
    with pytest.raises(UnsupportedVersion, match=r"^milvus-lite 3\.0 is installed"):
        opener(str(tmp_path / "shop.db"))


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        (
            "pymilvus",
            "2.6.3",
            "pymilvus 2.6.3 is installed, milvus-hubness needs pymilvus<4,>=3.0.1: pip install",
        ),
        (
            "pymilvus",
            "4.0.0",
            "pymilvus 4.0.0 is installed, milvus-hubness needs pymilvus<4,>=3.0.1: pip install",
        ),
        (
            "torch",
            "2.1.0+cpu",
            "torch 2.1.0+cpu is installed, milvus-hubness needs torch>=2.8: pip install 'torch>=2.8'",
        ),
        (
            "qdrant-client",
            "1.9.0",
            "qdrant-client 1.9.0 is installed, qdrant-hubness needs qdrant-client<2,>=1.20: pip",
        ),
    ],
)
def test_a_library_of_an_unsupported_version_explains_an_error_in_one_line(
    installed, monkeypatch, capsys, name, version, said
):
    """Whatever the error is: a name that cannot be imported, an attribute, an argument."""
    assert requirements.unsupported_libraries() == ""
    installed(name, version)
    with pytest.raises(UnsupportedVersion) as refused, naming_extras():
        from numpy import no_such_name  # noqa: F401
    assert str(refused.value).startswith(said)

    def app(**options):
        return np.no_such_attribute

    monkeypatch.setattr(sys, "argv", ["milvus-hubness"])
    with pytest.raises(SystemExit) as ended:
        console.run(app)
    complaint = capsys.readouterr().err
    assert (ended.value.code, complaint.count("\n")) == (1, 1)
    assert complaint.startswith(f"milvus-hubness: {said}")


def test_other_errors_keep_their_tracebacks(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["milvus-hubness"])
    with pytest.raises(SystemExit):
        console.run(lambda **options: np.no_such_attribute)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "accepted"), [("1.9.7", False), ("0.11.2", False), ("1.10.0", True), ("dev", True)]
)
def test_a_qdrant_server_that_is_too_old_is_refused_in_one_line(monkeypatch, version, accepted):
    from qdrant_hubness.store import requests

    info = SimpleNamespace(version=version)
    monkeypatch.setattr(
        requests, "QdrantClient", lambda **options: SimpleNamespace(info=lambda: info)
    )
    if accepted:
        assert requests.connect("http://localhost:6333").info() is info
        return
    with pytest.raises(UnsupportedVersion) as refused:
        requests.connect("http://root:sesame@localhost:6333")
    assert str(refused.value) == (
        f"the server at http://***@localhost:6333 runs Qdrant {version}: upgrade it to 1.10 or newer"
    )


def test_a_qdrant_server_without_formulas_cannot_enable(monkeypatch):
    from milvus_hubness.errors import CannotMigrate
    from qdrant_hubness import QdrantStore

    store = object.__new__(QdrantStore)
    monkeypatch.setattr(QdrantStore, "server_version", lambda self: "qdrant 1.13.4")
    with pytest.raises(
        CannotMigrate, match=r"'products' cannot be enabled: qdrant 1.13.4 has no formulas"
    ):
        store.beside_remarks(SimpleNamespace(name="products"))
