"""The command: listens where it is told to, with TLS, and ends as it is told to."""

import subprocess

import grpc
import pytest
from typer.testing import CliRunner

from milvus_hubness.cli import app
from milvus_hubness.errors import InvalidParameter
from tests.proxy.running import ProxyProcess
from tests.proxy.upstreams import FakeUpstream

PATH = "/milvus.proto.milvus.MilvusService/Flush"


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_it_speaks_tls_and_ends_in_peace(tmp_path, workers):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    of_one_day = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    named = ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    try:
        subprocess.run(["openssl", "req", *of_one_day, *named], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    upstream = FakeUpstream()
    told = ["--tls-cert", str(certificate), "--tls-key", str(key), "--workers", workers]
    with ProxyProcess(upstream.address, *told) as proxy:
        port = proxy.address.rpartition(":")[2]
        trusting = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(f"localhost:{port}", trusting) as channel:
            assert channel.unary_unary(PATH)(b"hello", timeout=20) == b"hello"
        assert proxy.stop() == 0
    upstream.stop()


@pytest.mark.parametrize(
    "options",
    [
        ["--upstream", "nowhere"],
        ["--upstream", "localhost:1", "--tls-cert", __file__],
        ["--upstream", "localhost:1", "--upstream-ca", __file__],
        ["--upstream", "localhost:1", "--tls-cert", "/nowhere", "--tls-key", "/nowhere"],
        ["--upstream", "localhost:1", "--host", "256.0.0.1"],
    ],
    ids=" ".join,
)
def test_wrong_options_are_refused(options):
    done = CliRunner().invoke(app, ["proxy", *options])
    assert isinstance(done.exception, InvalidParameter)
