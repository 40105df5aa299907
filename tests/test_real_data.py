"""Tests that read real data are marked `needs_real_data`, so that the suite passes where they are missing."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
READERS = {"load_task", "fit_on", "recall_at_1", "reference"}
MARK = "needs_real_data"

FILES = [
    path
    for path in sorted(TESTS.rglob("test_*.py"))
    if path != Path(__file__) and "tests.support.real_data" in path.read_text()
]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_in(node: ast.AST) -> set[str]:
    """Return the names that a part of a module mentions."""
    return {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}


def uses(node: ast.AST, readers: set[str]) -> bool:
    """Whether a function or class calls a reader of real data, or asks for a fixture that is one."""
    called = {
        call.func.id
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    fixtures = {found.arg for found in node.args.args} if isinstance(node, Function) else set()
    return bool(called & readers or fixtures & (readers - READERS))


def unmarked(source: str) -> Iterator[str]:
    """Yield the tests of a module that read real data, themselves or by what they call, without the mark."""
    module = ast.parse(source)
    if any(
        isinstance(node, ast.Assign) and names_in(node) == {"pytestmark", MARK}
        for node in module.body
    ):
        return
    parts = {node.name: node for node in module.body if isinstance(node, Function | ast.ClassDef)}
    readers = set(READERS)
    while more := {
        name for name, node in parts.items() if name not in readers and uses(node, readers)
    }:
        readers |= more
    for name, node in parts.items():
        if isinstance(node, Function) and name.startswith("test_") and name in readers:
            marks = set().union(*map(names_in, node.decorator_list))
            if MARK not in marks:
                yield name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_every_test_that_reads_real_data_has_the_mark(path: Path) -> None:
    assert not list(unmarked(path.read_text()))


def test_a_test_without_the_mark_is_found() -> None:
    source = "def items():\n    return load_task('a').gallery\n\ndef test_items():\n    assert len(items())\n"
    assert list(unmarked(source)) == ["test_items"]
    assert not list(unmarked(source.replace("def test", f"@{MARK}\ndef test")))
