"""Pairs of docstring and function body, read from the Python standard library's own source files."""

from __future__ import annotations

import ast
import os
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from milvus_hubness.errors import UnreadableFile

TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
MIN_DOCSTRING_CHARS = 30
MIN_BODY_CHARS = 60


class Pair(NamedTuple):
    """A question and its one right answer: what a function says it does, and how it does it.

    name: "module.Class.function".
    body: source text of the function after its docstring, comments included.
    """

    name: str
    docstring: str
    body: str


def collect(root: Path | None = None) -> list[Pair]:
    """Every documented function under `root` (default: the standard library), in a fixed order.

    A name, docstring or body that was seen before is left out: each question has one right answer.
    Raises UnreadableFile if there is none, as on a Python that ships without its sources.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    pairs: list[Pair] = []
    seen: set[str] = set()
    for path in _source_files(root):
        for pair in _functions(path, _module_name(path.relative_to(root))):
            if seen.isdisjoint(pair):
                seen.update(pair)
                pairs.append(pair)
    if not pairs:
        raise UnreadableFile(f"no source files with documented functions under {root}")
    return pairs


def _source_files(root: Path) -> Iterator[Path]:
    """The importable files: site-packages and its like are no identifiers, and tests are left out."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(filter(str.isidentifier, set(subfolders) - TEST_FOLDERS))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _functions(path: Path, module: str) -> Iterator[Pair]:
    """The documented functions and methods of one file; none if it cannot be read or parsed."""
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = file.read()
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return
    yield from _walk(tree, module, source.split("\n"))


def _walk(node: ast.AST, prefix: str, lines: list[str]) -> Iterator[Pair]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _walk(child, prefix, lines)
            continue
        name = f"{prefix}.{child.name}"
        if not isinstance(child, ast.ClassDef):
            docstring = ast.get_docstring(child) or ""
            body = textwrap.dedent("\n".join(lines[child.body[0].end_lineno : child.end_lineno])).strip()
            if len(docstring) >= MIN_DOCSTRING_CHARS and len(body) >= MIN_BODY_CHARS:
                yield Pair(name, docstring, body)
        yield from _walk(child, name, lines)
