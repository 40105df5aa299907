"""A database behind TLS: authorities of one's own, certificates of clients, and why no connection comes about."""

import json
from concurrent import futures
from typing import NamedTuple

import grpc
import numpy as np
import pytest
from milvus_lite.server_manager import server_manager_instance

from milvus_hubness import HubnessClient
from milvus_hubness.basics.defaults import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from tests.cli.conftest import assert_fails
from tests.support.born import create_corrected
from tests.support.galleries import vectors
from tests.support.tls import Authority, Terminator

DIM = 8
NAMES = ("ca", "cert", "key")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


class Files(NamedTuple):
    ca: str
    cert: str = ""
    key: str = ""

    def variables(self):
        return {f"MILVUS_HUBNESS_{name.upper()}": getattr(self, name) for name in self.given()}

    def given(self):
        return [name for name in NAMES if getattr(self, name)]


@pytest.fixture(scope="module")
def milvus(tmp_path_factory):
    """HOST:PORT of a Milvus that speaks no TLS, with the corrected collection `products`."""
    path = str(tmp_path_factory.mktemp("lite") / "shop.db")
    client = HubnessClient(path)
    rng = np.random.default_rng(4)
    create_corrected(client, "products", vectors(rng, 60, DIM), vectors(rng, 30, DIM), "COSINE")
    yield server_manager_instance.start_and_get_uri(path).removeprefix("http://")
    client.close()
    server_manager_instance.release_server(path)


@pytest.fixture(scope="module")
def secured(milvus, authority):
    """The address of a Milvus that speaks TLS, and of one that wants certificates of clients, with the files for it."""
    signed = authority.sign("milvus")
    key, cert = authority.sign("client")
    open_server = Terminator(milvus, *signed)
    strict_server = Terminator(milvus, *signed, clients_of=authority.file)
    yield {
        "an own authority": (f"https://{open_server.address}", Files(str(authority.file))),
        "certificates of clients": (
            f"https://{strict_server.address}",
            Files(str(authority.file), str(cert), str(key)),
        ),
    }
    open_server.stop()
    strict_server.stop()


BOTH = ("an own authority", "certificates of clients")


@pytest.mark.parametrize("wanted", BOTH)
def test_a_command_reaches_it(run, milvus, secured, wanted):
    uri, files = secured[wanted]
    done = run("status", "products", "--json", uri=uri, **files.variables())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"]["rows"] == 60


@pytest.mark.parametrize("wanted", BOTH)
def test_so_does_a_command_that_searches(run, milvus, secured, tmp_path, wanted):
    """It has a client beside its store."""
    uri, files = secured[wanted]
    np.save(tmp_path / "queries.npy", vectors(np.random.default_rng(5), 20, DIM))
    words = ["--queries", str(tmp_path / "queries.npy"), "--out", str(tmp_path / "out.parquet")]
    done = run("match", "products", *words, "--json", uri=uri, **files.variables())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["match"]["queries"] == 20


@pytest.mark.parametrize("by", ["its configuration", "variables"])
@pytest.mark.parametrize("wanted", BOTH)
def test_so_does_the_service(run, milvus, secured, tmp_path, wanted, by):
    uri, files = secured[wanted]
    keys = [f'{name} = "{getattr(files, name)}"' for name in files.given()]
    keys = keys if by == "its configuration" else []
    config = tmp_path / "hubness.toml"
    lines = ["[server]", f'uri = "{uri}"', *keys, "[[collection]]", 'name = "products"']
    config.write_text("\n".join(lines))
    variables = files.variables() if by == "variables" else {}
    done = run("serve", "--config", str(config), "--check", **variables)
    assert done.returncode == 0, done.stderr
    assert "valid" in done.stdout


def test_the_service_writes_its_configuration_over_tls(run, milvus, secured, tmp_path):
    uri, files = secured["certificates of clients"]
    config = tmp_path / "hubness.toml"
    done = run("serve", "--config", str(config), "--init", "products", uri=uri, **files.variables())
    assert done.returncode == 0, done.stderr
    assert uri in config.read_text()


class Refusing(grpc.GenericRpcHandler):
    """A Milvus with authorization, for those without a right token."""

    def service(self, details):
        def answer(request, context):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "auth check failure, check api key")

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def refusing():
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Refusing()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.mark.parametrize("variables", [{}, {"MILVUS_HUBNESS_TOKEN": "root:wrong-token"}])
def test_a_token_that_milvus_does_not_take_is_named(run, refusing, variables):
    done = run("status", "products", uri=refusing, **variables)
    assert_fails(done, 1, f"Milvus at {refusing} refuses the token", "$MILVUS_HUBNESS_TOKEN")
    assert "wrong-token" not in done.stderr


def test_a_connection_that_is_refused_is_named(run):
    assert_fails(
        run("status", "products", uri="http://127.0.0.1:1"),
        1,
        "http://127.0.0.1:1: connection refused",
    )


def test_a_name_that_is_unknown_is_named(run):
    done = run("status", "products", uri="http://milvus.invalid:19530")
    assert_fails(done, 1, "no Milvus answers at http://milvus.invalid:19530: ")


CAUSES = {
    "nobody is trusted": ("an own authority", [], "no trusted authority", "($MILVUS_HUBNESS_CA)"),
    "another is trusted": (
        "an own authority",
        ["ca of another"],
        "no trusted authority",
        "($MILVUS_HUBNESS_CA)",
    ),
    "no certificate is shown": (
        "certificates of clients",
        ["ca"],
        "a client's certificate",
        "($MILVUS_HUBNESS_CERT and _KEY)",
    ),
    "that of another authority is shown": (
        "certificates of clients",
        ["ca", "cert of another"],
        "another certificate than",
        "($MILVUS_HUBNESS_CERT)",
    ),
}


@pytest.mark.parametrize("case", CAUSES)
def test_a_certificate_that_one_of_them_refuses_is_named(run, secured, tmp_path, case):
    wanted, trusted, *said = CAUSES[case]
    uri, files = secured[wanted]
    other = Authority(tmp_path, "other")
    key, cert = other.sign("a stranger")
    words = {
        "ca": {CA_VARIABLE: files.ca},
        "ca of another": {CA_VARIABLE: str(other.file)},
        "cert of another": {CERT_VARIABLE: str(cert), KEY_VARIABLE: str(key)},
    }
    named = {variable: file for name in trusted for variable, file in words[name].items()}
    assert_fails(run("status", "products", uri=uri, **named), 1, "no Milvus answers", uri, *said)


def test_a_certificate_of_another_host_is_named(run, milvus, authority):
    server = Terminator(milvus, *authority.sign("elsewhere", host="milvus.example"))
    uri = f"https://{server.address}"
    done = run("status", "products", uri=uri, MILVUS_HUBNESS_CA=str(authority.file))
    assert_fails(done, 1, f"no Milvus answers at {uri}: its certificate is of another host")
    server.stop()


def test_tls_on_one_side_only_is_named(run, refusing, secured):
    uri, files = secured["an own authority"]
    plain = refusing.replace("http", "https")
    done = run("status", "products", uri=plain, MILVUS_HUBNESS_CA=files.ca)
    assert_fails(done, 1, f"{plain}: it does not use TLS: write http://")
    encrypted = uri.replace("https", "http")
    assert_fails(
        run("status", "products", uri=encrypted, MILVUS_HUBNESS_CA=""),
        1,
        f"{encrypted}: ",
        "write https://",
    )


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["ca"], "holds nothing in PEM"),
        (["cert"], "no key for TLS"),
        (["key"], "no cert for TLS"),
        (["cert", "key"], "holds nothing in PEM"),
    ],
    ids=str,
)
def test_a_file_that_is_no_certificate_is_named(run, tmp_path, names, said):
    file = tmp_path / "file.pem"
    file.write_text("hello")
    named = {f"MILVUS_HUBNESS_{name.upper()}": str(file) for name in names}
    uri = "https://127.0.0.1:1"
    assert_fails(run("status", "products", uri=uri, **named), 2, said)

    lines = ["[server]", f'uri = "{uri}"', *(f'{name} = "file.pem"' for name in names)]
    (tmp_path / "hubness.toml").write_text("\n".join([*lines, "[[collection]]", 'name = "a"']))
    assert_fails(run("serve", "--config", str(tmp_path / "hubness.toml"), "--check"), 2, said)


@pytest.mark.parametrize("name", ["CA", "CERT", "KEY"])
def test_a_missing_file_is_named_with_its_variable(run, name):
    variable = f"MILVUS_HUBNESS_{name}"
    done = run("status", "products", uri="https://127.0.0.1:1", **{variable: "gone.pem"})
    assert_fails(done, 2, f"${variable} names 'gone.pem'", "not there")


@pytest.mark.parametrize(
    "uri", ["http://root:Pw-0f-tls@127.0.0.1:1", "shop.db", "qdrant+http://localhost:1"]
)
@pytest.mark.parametrize(
    "command", [["status", "products"], ["demo", "--uri"]], ids=["status", "demo"]
)
def test_certificates_do_not_go_with_an_address_without_tls(run, authority, command, uri):
    """A token would cross the network in the clear although its user has asked for TLS."""
    words = [*command, uri] if command[0] == "demo" else command
    done = run(*words, uri=uri, MILVUS_HUBNESS_CA=str(authority.file))
    assert_fails(done, 2, "begin with https://", "$MILVUS_HUBNESS_CA")
    assert "Pw-0f-tls" not in done.stderr


def test_a_certificate_needs_the_authorities_of_the_server(run, authority):
    """Since pymilvus would leave the certificate out, silently."""
    key, cert = authority.sign("lonely")
    named = {CERT_VARIABLE: str(cert), KEY_VARIABLE: str(key)}
    done = run("status", "products", uri="https://127.0.0.1:1", **named)
    assert_fails(done, 2, "$MILVUS_HUBNESS_CA too")
