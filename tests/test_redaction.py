"""Secrets in texts that leave the process, and in the errors of `connect`."""

import json
import logging
import time

import pytest

from milvus_hubness import InvalidParameter, ServerUnavailable, connect
from milvus_hubness.errors import redacted, secrets_in

PASSWORD = "Pa55-for-redaction"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "no Milvus answers at http://root:pass@host:19530",
            "no Milvus answers at http://***@host:19530",
        ),
        ("http://apikey@host", "http://***@host"),
        ("https://root:a/b@c?d#e@host/db and tcp://b:c@d", "https://***@host/db and tcp://***@d"),
        ("s3://key:sec/ret@bucket/folder", "s3://***@bucket/folder"),
        ("'root:pass@127.0.0.1:1' is no address", "'***@127.0.0.1:1' is no address"),
        (
            '{"uri": "http://root:pass@host", "to": "me@home"}',
            '{"uri": "http://***@host", "to": "me@home"}',
        ),
        ("<a href='http://host:9108/'>me@home</a>", "<a href='http://host:9108/'>me@home</a>"),
        ("a { b:c }\n@media print { d:e }", "a { b:c }\n@media print { d:e }"),
        (
            "at 12:30, mail to me@home or git@github.com:shop",
            "at 12:30, mail to me@home or git@github.com:shop",
        ),
    ],
)
def test_the_user_and_the_password_of_a_uri_are_replaced_and_nothing_else(text, expected):
    assert redacted(text) == expected
    assert redacted(expected) == expected


def test_secrets_are_replaced_as_they_are_written_and_decoded(monkeypatch):
    secrets = secrets_in('http://root:a"%40b@host:1/db')
    assert secrets == {'root:a"%40b', 'root:a"@b'}
    assert (
        redacted(json.dumps({"said": 'root:a"@b and root:a"%40b'}), secrets)
        == '{"said": "*** and ***"}'
    )
    for uri in ("folder/shop@home.db", "http://host:1", "http://root@host:1"):
        assert not secrets_in(uri)
    monkeypatch.setenv("MILVUS_TOKEN", "t0ken")
    monkeypatch.setenv("QDRANT_API_KEY", "k3y")
    assert redacted("t0ken, k3y") == "***, ***"


def test_long_texts_take_no_time():
    began = time.monotonic()
    for run in ("a", "a:", "a/", "a:b/", "a.", "://", "http://a,", 'M1.5,2:"'):
        redacted(run * (200_000 // len(run)))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("uri", "error"),
    [
        (f"http://root:{PASSWORD}@127.0.0.1:1", ServerUnavailable),
        (f"https://root:{PASSWORD}@127.0.0.1:1/db", ServerUnavailable),
        (f"http://root:%23{PASSWORD}@127.0.0.1:1", ServerUnavailable),
        (f"http://root:@{PASSWORD}@127.0.0.1:1", ServerUnavailable),
        (f"http://root:'{PASSWORD} \"@127.0.0.1:1", ServerUnavailable),
        (f"http://{PASSWORD}@127.0.0.1:1", ServerUnavailable),
        (f"ftp://root:{PASSWORD}@127.0.0.1:1", ServerUnavailable),
        (f"root:{PASSWORD}@127.0.0.1:1", InvalidParameter),
        (f"http://root:/{PASSWORD}@127.0.0.1:1", InvalidParameter),
        (f"http://root:12/{PASSWORD}@127.0.0.1:1", InvalidParameter),
        (f"http://root:{PASSWORD}@127.0.0.1:port", InvalidParameter),
        (f"http://root:{PASSWORD}@[::1", InvalidParameter),
    ],
)
def test_connect_names_the_address_without_the_password(uri, error, caplog):
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL + 1)
    with pytest.raises(error) as raised:
        connect(uri, "t0ken-" + PASSWORD, timeout=1)
    assert "***@" in str(raised.value)
    seen = raised.value
    while seen is not None:
        assert PASSWORD not in str(seen) + repr(seen)
        seen = seen.__cause__ or seen.__context__
    assert PASSWORD not in caplog.text
