"""pymilvus's private members: one file uses them, and the installed pymilvus has them all."""

import ast
import inspect
import json
import logging
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pymilvus
import pytest

from milvus_hubness.milvus.client.held_errors import watch_pymilvus
from milvus_hubness.milvus.pymilvus_private import PRIVATE_MEMBERS, PrivateMember

ROOT = Path(__file__).parents[2] / "milvus_hubness"
FILE = "milvus/pymilvus_private.py"


def is_present(member):
    """Whether a class has the member, or names it: attributes of objects and unnamed arguments."""
    module, name = member.owner.split(":")
    owner = getattr(import_module(module), name)
    return hasattr(owner, member.name) or any(
        member.name in inspect.getsource(parent) for parent in owner.__mro__ if parent is not object
    )


def test_the_installed_pymilvus_has_every_private_member():
    assert [member for member in PRIVATE_MEMBERS if not is_present(member)] == []


@pytest.mark.parametrize("name", ["_nothing", "_QueryIterator__nothing"])
def test_a_member_that_pymilvus_lacks_is_noticed(name):
    assert not is_present(PrivateMember("pymilvus.client.iterator:QueryIterator", name))


def private_names(tree):
    """The private names that a file reads, sets, overrides or names in a text, but for its own of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
        elif isinstance(node, ast.keyword):
            name = node.arg or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        else:
            continue
        if name.startswith("_") and name.isidentifier() and not name.startswith("__"):
            yield name


def defined_in(trees):
    """The names of functions and attributes that some files define, mangled ones included."""
    names = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return names


def test_one_file_uses_private_members_of_pymilvus():
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8"))
        for path in ROOT.rglob("*.py")
    }
    package = Path(pymilvus.__file__).parent
    of_pymilvus = defined_in(
        ast.parse(path.read_text("utf-8"))
        for path in [*package.glob("client/**/*.py"), *package.glob("milvus_client/*.py")]
    )
    listed = {member.name for member in PRIVATE_MEMBERS}
    of_named_tuples = {"_fields", "_replace", "_asdict"}
    own = defined_in(tree for name, tree in trees.items() if name != FILE) - listed

    def is_pymilvus(name):
        return (
            name in listed or name in of_pymilvus - own - of_named_tuples or "__" in name.strip("_")
        )

    uses = {
        name: sorted({use for use in private_names(tree) if is_pymilvus(use)})
        for name, tree in trees.items()
        if name.startswith(("milvus/", "demo/", "cli/"))
    }
    assert set(uses.pop(FILE)) == listed
    assert {name: used for name, used in uses.items() if used} == {}


def test_an_import_changes_no_logger_of_pymilvus():
    code = """
import json, logging
import pymilvus
def state():
    names = [name for name in logging.Logger.manager.loggerDict if name.startswith("pymilvus")]
    loggers = [logging.getLogger(), *map(logging.getLogger, sorted({*names, "pymilvus.decorators"}))]
    return [[one.name, one.level, len(one.filters), len(one.handlers)] for one in loggers]
before = state()
import milvus_hubness.milvus.client.sync
import milvus_hubness.milvus.client.operations
import milvus_hubness.milvus.store.milvus_store
import milvus_hubness.milvus.proxy
print(json.dumps([before, state()]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    known = {name for name, *_ in before}
    assert [state for state in after if state[0] in known] == before


def test_many_clients_add_one_filter():
    logger = logging.getLogger("pymilvus.decorators")
    for _ in range(3):
        watch_pymilvus()
    assert len([one for one in logger.filters if type(one).__name__ == "_Hold"]) == 1
