"""The command: listens where it is told to, with TLS, and ends as it is told to."""

import os
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from typer.testing import CliRunner

from milvus_hubness.cli import app
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.milvus.proxy import ProxyOptions
from tests.milvus.proxy.certificates import certificate_of
from tests.milvus.proxy.raw_calls import SERVICE
from tests.milvus.proxy.running import ProxyProcess
from tests.milvus.proxy.upstreams import FakeUpstream


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_it_speaks_tls_and_ends_in_peace(tmp_path, workers):
    alternative_name = ["-addext", "subjectAltName=DNS:localhost"]
    key, certificate = certificate_of(tmp_path, "localhost", "-nodes", *alternative_name)
    upstream = FakeUpstream()
    told = ["--tls-cert", str(certificate), "--tls-key", str(key), "--workers", workers]
    with ProxyProcess(upstream.address, *told) as proxy:
        port = proxy.address.rpartition(":")[2]
        trusting = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(f"localhost:{port}", trusting) as channel:
            assert channel.unary_unary(SERVICE + "Flush")(b"hello", timeout=20) == b"hello"
        assert proxy.stop() == 0
    upstream.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files that are no certificates, and some that are."""
    here = tmp_path_factory.mktemp("pem")
    (here / "empty.pem").touch()
    (here / "text.pem").write_text("a text")
    (here / "binary.pem").write_bytes(bytes(range(256)))
    (here / "cut.pem").write_text("-----BEGIN CERTIFICATE-----\nMIIB\n")
    (here / "wrong.pem").write_text(
        "-----BEGIN CERTIFICATE-----\nTWlsdnVz\n-----END CERTIFICATE-----\n"
    )
    with (here / "huge.pem").open("wb") as huge:
        huge.truncate(1 << 30)
    os.mkfifo(here / "fifo.pem")
    certificate_of(here, "a")
    certificate_of(here, "b")
    certificate_of(here, "secret", "-passout", "pass:secret")
    return here


NO_CERTIFICATES = [
    ("nowhere.pem", "no such file"),
    (".", "is a folder: name a file"),
    ("fifo.pem", "is a pipe: name a file"),
    ("huge.pem", "this is another kind of file"),
    ("empty.pem", "holds nothing in PEM"),
    ("text.pem", "holds nothing in PEM"),
    ("binary.pem", "holds nothing in PEM"),
    ("cut.pem", "has no certificate"),
    ("wrong.pem", "has no certificate"),
    ("a-key.pem", "has no certificate"),
]


def refusal(*options):
    """What the command says, in one line, before it listens."""
    done = CliRunner().invoke(app, ["proxy", *map(str, options)])
    assert isinstance(done.exception, InvalidParameter), done.exception
    line = str(done.exception)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(("name", "reason"), NO_CERTIFICATES)
def test_authorities_that_are_no_certificate_are_refused_at_the_start(
    folder, monkeypatch, name, reason
):
    monkeypatch.setenv("MILVUS_HUBNESS_CA", str(folder / name))
    line = refusal("--upstream", "localhost:1", "--upstream-tls")
    assert str(folder / name) in line
    assert ("not there" if name == "nowhere.pem" else reason) in line


@pytest.mark.parametrize(("name", "reason"), NO_CERTIFICATES)
def test_a_certificate_that_is_none_is_refused_at_the_start(folder, name, reason):
    line = refusal(
        "--upstream", "localhost:1", "--tls-key", folder / "a-key.pem", "--tls-cert", folder / name
    )
    assert str(folder / name) in line
    assert reason in line


@pytest.mark.parametrize(
    "name", ["b-key.pem", "secret-key.pem", "a-cert.pem", "empty.pem", "nowhere.pem"]
)
def test_a_key_of_another_certificate_is_refused_at_the_start(folder, name):
    line = refusal(
        "--upstream", "localhost:1", "--tls-key", folder / name, "--tls-cert", folder / "a-cert.pem"
    )
    assert name in line


def test_authorities_without_tls_are_refused(folder, monkeypatch):
    monkeypatch.setenv("MILVUS_HUBNESS_CA", str(folder / "a-cert.pem"))
    assert "--upstream-tls" in refusal("--upstream", "localhost:1")


@pytest.mark.parametrize(
    ("upstream", "remedy"),
    [
        ("http://localhost:19530", "write localhost:19530"),
        ("http://localhost:19530/", "write localhost:19530"),
        ("https://milvus.example:443", "write milvus.example:443 and add --upstream-tls"),
        ("tcp://[::1]:19530/default", "write [::1]:19530"),
        ("http://root:secret@localhost:19530", "leave out user and password"),
        ("root:secret@localhost:19530", "leave out user and password"),
        ("localhost", "HOST:PORT"),
        ("localhost:0", "HOST:PORT"),
        ("localhost:99999", "HOST:PORT"),
        ("localhost:\N{ARABIC-INDIC DIGIT ONE}", "HOST:PORT"),
        ("local host:19530", "HOST:PORT"),
        ("localhost:19530/default", "HOST:PORT"),
        ("/tmp/milvus.db", "HOST:PORT"),
    ],
)
def test_an_upstream_of_another_form_is_refused_with_the_right_one(upstream, remedy):
    line = refusal("--upstream", upstream)
    assert remedy in line
    assert "secret" not in line


@pytest.mark.parametrize(
    "upstream", ["localhost:19530", "10.0.0.1:1", "[::1]:19530", "my_milvus.my-space.svc:443"]
)
def test_hosts_with_ports_are_taken(upstream):
    assert ProxyOptions(upstream).upstream == upstream


def test_less_than_two_messages_in_flight_are_refused():
    limits = ["--max-message-mib", "100", "--max-in-flight-mib", "150"]
    assert "twice" in refusal("--upstream", "localhost:1", *limits)
    assert ProxyOptions("localhost:1", max_message=100 << 20).budget == 400 << 20


def test_the_largest_message_is_that_of_grpc():
    assert "at most 2,047 MiB" in refusal("--upstream", "localhost:1", "--max-message-mib", "2048")
    options = ProxyOptions("localhost:1", max_message=2_047 << 20, drain=86_400.0)
    channel = options.open_channel(grpc)
    channel.close()
    grpc.server(ThreadPoolExecutor(1), options=options.server_options()).stop(None)


@pytest.mark.parametrize(
    "options",
    [
        ["--upstream", "nowhere"],
        ["--upstream", "localhost:1", "--tls-cert", __file__],
        ["--upstream", "localhost:1", "--tls-cert", "/nowhere", "--tls-key", "/nowhere"],
        ["--upstream", "localhost:1", "--host", "256.0.0.1"],
        ["--upstream", "localhost:1", "--max-message-mib", "2048"],
        ["--upstream", "localhost:1", "--max-message-mib", "100000000000000000000"],
        ["--upstream", "localhost:1", "--drain", "inf"],
        ["--upstream", "localhost:1", "--drain", "1e300"],
    ],
    ids=" ".join,
)
def test_wrong_options_are_refused(options):
    done = CliRunner().invoke(app, ["proxy", *options])
    assert isinstance(done.exception, InvalidParameter)
