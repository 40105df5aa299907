"""Tests that read real data are marked `needs_real_data`, so that the suite passes where they are missing, and have
names that say so: who sees one skipped knows why."""

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


def names_in(*nodes: ast.AST) -> set[str]:
    """Return the names that parts of a module mention."""
    return {found.id for node in nodes for found in ast.walk(node) if isinstance(found, ast.Name)}


def says_so(*names: str) -> bool:
    return any("realdata" in name.lower().replace("_", "") for name in names)


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
    if is_marked(module):
        return
    parts = {node.name: node for node in module.body if isinstance(node, Function | ast.ClassDef)}
    readers = set(READERS)
    while more := {
        name for name, node in parts.items() if name not in readers and uses(node, readers)
    }:
        readers |= more
    for name, node in parts.items():
        is_test = isinstance(node, Function) and name.startswith("test_")
        if is_test and name in readers and MARK not in names_in(*node.decorator_list):
            yield name


def is_marked(module: ast.Module) -> bool:
    """Whether all tests of a module have the mark."""
    return any(
        isinstance(node, ast.Assign) and names_in(node) == {"pytestmark", MARK}
        for node in module.body
    )


def silent(name: str, source: str) -> Iterator[str]:
    """Yield the tests and classes of a module that have the mark, while neither the module's name, nor theirs, nor
    that of the marked case says so."""
    module = ast.parse(source)
    if is_marked(module) and not says_so(name):
        yield name
    for node in module.body:
        if isinstance(node, Function | ast.ClassDef) and MARK in names_in(*node.decorator_list):
            cases = (
                str(found.value)
                for decorator in node.decorator_list
                for found in ast.walk(decorator)
                if isinstance(found, ast.Constant)
            )
            if not says_so(node.name, *cases):
                yield node.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_every_test_that_reads_real_data_has_the_mark(path: Path) -> None:
    assert not list(unmarked(path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_every_test_with_the_mark_says_so_in_its_name(path: Path) -> None:
    assert not list(silent(path.stem, path.read_text()))


def test_a_test_without_the_mark_is_found() -> None:
    source = "def items():\n    return load_task('a').gallery\n\ndef test_items():\n    assert len(items())\n"
    assert list(unmarked(source)) == ["test_items"]
    assert not list(unmarked(source.replace("def test", f"@{MARK}\ndef test")))


def test_a_name_that_says_nothing_of_real_data_is_found() -> None:
    source = f"@{MARK}\ndef test_items():\n    load_task('a')\n"
    assert list(silent("test_a", source)) == ["test_items"]
    assert not list(silent("test_a", source.replace("test_items", "test_items_on_real_data")))
    case = f"@pytest.mark.parametrize('a', [pytest.param(1, marks={MARK}, id='1, real_data')])\n"
    assert not list(silent("test_a", case + source.partition("\n")[2]))
    whole = f"pytestmark = {MARK}\ndef test_items():\n    load_task('a')\n"
    assert list(silent("test_a", whole)) == ["test_a"]
    assert not list(silent("test_a_on_real_data", whole))
