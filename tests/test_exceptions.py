"""Each exception that a docstring names exists, and the runbook explains those of this package.

Docstrings name them in sentences: "Raises InvalidInput, and KeyError if the row is gone."
"""

import ast
import builtins
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pymilvus
import pytest

import milvus_hubness
from milvus_hubness.errors import HubnessError, StoreError

ROOT = Path(__file__).parents[1]
PACKAGES = [
    ROOT / "milvus_hubness",
    *(path.parent for path in sorted(ROOT.glob("integrations/*/*_hubness/__init__.py"))),
]
RUNBOOK = (ROOT / "docs" / "operations" / "runbook.md").read_text("utf-8")

SENTENCE = re.compile(r"\b[Rr]aises?\b(.*?)(?=\.(?:\s|$)|\Z)", re.DOTALL)
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"|\bas (?:\w+\.)*[A-Z][\w.]*")
"""Code, texts, and functions or classes that raise the same."""

NAME = re.compile(
    r"""
    # The word after the verb: "Raises Cancelled".
    ^\s(?P<after_verb>(?:[a-z_]+\.)*[A-Z]\w*)
    # A word between separators: "Raises LeaseLost, Cancelled and StoreError if it fails".
    | (?:[,;]|\band|\bor)\s(?P<listed>(?:[a-z_]+\.)*[A-Z]\w*)(?=[,;]|$|\s[a-z])
    # Any other word with a capital letter inside: "Raises, under COSINE, ZeroVectors".
    | \b(?P<compound>[A-Z]+[a-z]\w*[A-Z]\w*)
    """,
    re.VERBOSE,
)
NO_CLASSES = {"Milvus", "NaN", "NumPy", "Qdrant", "TTL"}
"""Words of such sentences that are no names of classes."""


def docstrings(path):
    """Yield the line and the text of each docstring of a file, also of those under fields."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            value = getattr(statement, "value", None)
            is_text = isinstance(statement, ast.Expr) and isinstance(value, ast.Constant)
            if is_text and isinstance(value.value, str):
                yield statement.lineno, value.value


def exceptions_named(docstring):
    """Yield each name in its sentences about exceptions, and whether it can be nothing else."""
    for sentence in SENTENCE.findall(docstring):
        text = QUOTED.sub("…", " ".join(["", *sentence.split()]))
        for match in NAME.finditer(text):
            name = match[match.lastgroup]
            is_after_verb = match.lastgroup == "after_verb"
            if is_after_verb or name not in NO_CLASSES:
                yield re.sub("Errors$", "Error", name), is_after_verb


@cache
def module_of(path):
    root = next(package.parent for package in PACKAGES if package in path.parents)
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


@cache
def sources(path):
    """Return the module of each name that a file defines or imports, also in its functions."""
    modules = {}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ClassDef):
            modules[node.name] = module_of(path)
        elif isinstance(node, ast.ImportFrom):
            modules |= {alias.asname or alias.name: node.module for alias in node.names}
    return modules


def resolve(name, path):
    """Return what a reader of the file imports by this name; None if there is no such thing.

    With dots, it is in a module of that name, or in a file of that name in the same folder.
    """
    module, _, word = name.rpartition(".")
    if module:
        beside = f"{module_of(path).rpartition('.')[0]}.{module}"
        is_beside = path.with_name(f"{module}.py").exists()
        return getattr(import_module(beside if is_beside else module), word, None)

    for namespace in (milvus_hubness, builtins, pymilvus):
        if hasattr(namespace, name):
            return getattr(namespace, name)
    source = sources(path).get(name)
    return getattr(import_module(source), name, None) if source else None


def is_explained(exception):
    """Whether the runbook has it, or has the base of one that only modules of the package know."""
    public = [base for base in exception.__mro__ if hasattr(milvus_hubness, base.__name__)]
    explained = public[:1] if exception in public else set(public) - {HubnessError}
    return any(f"`{base.__name__}`" in RUNBOOK for base in explained)


def faults(path, docstring):
    """Yield what is wrong with the exceptions that a docstring of a file names."""
    for name, is_after_verb in exceptions_named(docstring):
        value = resolve(name, path)
        is_exception = isinstance(value, type) and issubclass(value, BaseException)
        if value is None:
            yield f"{name} does not exist, or the file neither has nor imports it"
        elif is_after_verb and not is_exception:
            yield f"{name} is no exception"
        elif is_exception and issubclass(value, HubnessError) and not is_explained(value):
            yield f"{name} is not in the runbook"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_each_exception_that_a_docstring_names_exists(package):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in sorted(package.rglob("*.py"))
        for line, docstring in docstrings(path)
        for fault in faults(path, docstring)
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_of_functions_and_fields_are_read():
    package = PACKAGES[0]
    named = {
        name
        for file in ("jobs/common/lease.py", "milvus/proxy/sessions.py")
        for _, docstring in docstrings(package / file)
        for name, _ in exceptions_named(docstring)
    }
    assert {"LeaseHeld", "LeaseLost", "messages.Refused"} <= named


@pytest.mark.parametrize(
    ("docstring", "fault"),
    [
        ("Read it. Raises InvalidInputs.", "InvalidInputs does not exist"),
        ("Read it. Raises Stopped if it is stopped.", "Stopped does not exist"),
        ("Raise NotAdvised unless\nforced.", "NotAdvised does not exist"),
        ("Raises LeaseLost,\n    Halted and StoreError.", "Halted does not exist"),
        ("Raises as `fit` does, and NoRoom if it is full.", "NoRoom does not exist"),
        ("It raises, under COSINE, NullVectors.", "NullVectors does not exist"),
        ("Raises errors of the server, and json.DecodeError.", "json.DecodeError does not exist"),
        ("Raises QueryBank if it is empty.", "QueryBank is no exception"),
        ("Raises HiddenError.", "HiddenError is not in the runbook"),
        (
            "Raises HubnessError. Raises InvalidInput, KeyErrors, json.JSONDecodeError, Cancelled and StoreError.",
            "",
        ),
        ("Raises as QueryBank.load does, and StoreError, which names Milvus. Return Any.", ""),
        ('Raises MissingExtra for "TorchData" without NumPy, and InvalidInput for NaN.', ""),
        ("Raise the parameters of a search. Return a NewSearch.", ""),
    ],
)
def test_a_docstring_that_names_no_exception_is_found(monkeypatch, docstring, fault):
    hidden = type("HiddenError", (StoreError,), {})
    monkeypatch.setattr(milvus_hubness, "HiddenError", hidden, raising=False)
    reported = list(faults(PACKAGES[0] / "errors.py", docstring))
    assert [text.startswith(fault) for text in reported] == ([True] if fault else [])
