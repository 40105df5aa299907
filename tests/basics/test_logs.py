"""The audit log: a line for each collection that is dropped, whatever the log is set to."""

import ast
import getpass
import io
import logging
import os
from pathlib import Path

import pytest

from milvus_hubness.basics.logs import audit

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stream(monkeypatch):
    """What a program logs that has set up nothing but where."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    logger = logging.getLogger("milvus_hubness")
    logger.addHandler(handler)
    yield written
    logger.removeHandler(handler)


def test_a_line_says_what_when_and_by_whom(stream):
    audit("adopted", "products", renamed_from="goods")
    line = stream.getvalue()
    assert line.startswith("audit: 20")
    assert "Z adopted 'products' renamed_from='goods' user=" in line
    assert line.endswith(f"process={os.getpid()}\n")


def test_a_user_without_a_name_is_a_number(stream, monkeypatch):
    """As in a container that runs under any number."""

    def fail():
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", fail)
    audit("dropped", "products")
    assert f"user='{os.getuid()}'" in stream.getvalue()


def test_a_hostile_name_stays_on_its_line(stream):
    audit("dropped", "a\nb\x1b[2J", field="c\u202e\nd")
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
    assert "\u202e" not in stream.getvalue()


DROPS = {"drop_collection", "drop_collection_field", "delete_collection"}
"""The requests of the clients that drop something for good."""


def dropping():
    """Yield the functions of the jobs and stores that send such a request."""
    folders = ("milvus_hubness/jobs", "milvus_hubness/milvus/store", "milvus_hubness/extras")
    for folder in (*folders, "integrations/qdrant/qdrant_hubness/store"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for function in ast.walk(ast.parse(path.read_text())):
                if isinstance(function, ast.FunctionDef) and DROPS & set(requests_in(function)):
                    yield function


def requests_in(function):
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node.func.attr
            yield from (each.value for each in node.args if isinstance(each, ast.Constant))


def test_nothing_is_dropped_past_the_audit_log():
    """`BankGenerations.drop` logs each drop of a collection, and calls the `_drop` of the database."""
    functions = list(dropping())
    assert [each.name for each in functions].count("_drop") == 2, "one of Milvus, one of Qdrant"
    for function in functions:
        named = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        assert function.name == "_drop" or "audit" in named, function.name
