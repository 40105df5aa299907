"""How densely code is written: the figures that tell a telegram from prose, beside other packages.

    python -m benchmarks.readability [package …] [--json]

Packages are folders or names of installed packages; without any, this package and those of
integrations/. Nothing is enforced: the figures are for the next reader to compare, and a file that
reads well may have any of them.

    characters        mean length of a non-blank line, indentation included
    blank             blank lines in a hundred lines of function bodies
    comments          comment lines in a hundred lines
    several values    lines that assign several values at once, in a thousand: `a, b = 1, 2`
    records           classes that are dataclasses, named tuples or pydantic models, of all classes
    up, circles       imports of a storey above, and files in circles of imports (of this package)
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.environment import table
from tests.support.storeys import (
    MODULES,
    PACKAGE,
    ROOT,
    STOREYS,
    dotted,
    files,
    imports,
    storey_of,
)

OURS = (PACKAGE, *sorted(path.parent for path in ROOT.glob("integrations/*/*/__init__.py")))
RECORDS = {"dataclass", "NamedTuple", "BaseModel", "FrozenModel", "TypedDict"}


def folder_of(package: str) -> Path:
    """Return the folder of an installed package, or the folder itself."""
    if Path(package).is_dir():
        return Path(package)
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package!r} is neither a folder nor an installed package")
    return Path(spec.origin).parent


def sources(folder: Path) -> list[str]:
    files = sorted(folder.rglob("*.py"))
    return [path.read_text("utf-8") for path in files if "tests" not in path.parts]


def blank_and_all(source: str) -> tuple[int, int]:
    """Return the blank lines and all lines of the bodies of functions; an inner function counts once."""
    lines = source.splitlines()
    inside: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            has_docstring = ast.get_docstring(node) is not None
            if has_docstring and len(body) == 1:
                continue
            first = body[1] if has_docstring else body[0]
            inside.update(range(first.lineno, (node.end_lineno or first.lineno) + 1))
    return sum(not lines[number - 1].strip() for number in inside), len(inside)


def assigns_several(node: ast.AST) -> bool:
    """Whether a statement assigns several values, each of its own: not the parts of one value."""
    if not isinstance(node, ast.Assign):
        return False
    has_targets = any(isinstance(target, ast.Tuple) for target in node.targets)
    return has_targets and isinstance(node.value, ast.Tuple)


def is_record(node: ast.ClassDef) -> bool:
    named = [*node.bases, *node.decorator_list]
    names = {
        part.id if isinstance(part, ast.Name) else part.attr
        for expression in named
        for part in ast.walk(expression)
        if isinstance(part, ast.Name | ast.Attribute)
    }
    return bool(names & RECORDS)


def figures(folder: Path) -> dict[str, float]:
    lengths: list[int] = []
    lines = comments = blank = inside = several = records = classes = 0
    for source in sources(folder):
        rows = source.splitlines()
        lines += len(rows)
        lengths += [len(row) for row in rows if row.strip()]
        comments += sum(row.lstrip().startswith("#") for row in rows)
        empty, body = blank_and_all(source)
        blank += empty
        inside += body
        nodes = list(ast.walk(ast.parse(source)))
        several += sum(map(assigns_several, nodes))
        defined = [node for node in nodes if isinstance(node, ast.ClassDef)]
        classes += len(defined)
        records += sum(map(is_record, defined))
    return {
        "lines": lines,
        "characters": round(sum(lengths) / len(lengths), 1),
        "blank": round(100 * blank / max(1, inside), 1),
        "comments": round(100 * comments / lines, 1),
        "several values": round(1000 * several / lines, 1),
        "records": records,
        "classes": classes,
    }


def arrows() -> dict[str, int]:
    """Return the imports of this package that point up, and its files in circles."""
    up = 0
    below: dict[str, set[str]] = {}
    for path in files():
        storey = STOREYS.index(storey_of(path))
        inner = [module for module in imports(path) if module in MODULES]
        named = [module.split(".")[1] for module in inner if "." in module]
        up += sum(STOREYS.index(name) > storey for name in named)
        below[dotted(path)] = set(inner) - {dotted(path)}
    while True:
        used = set().union(*below.values()) if below else set()
        inner_files = {
            module: imported & below.keys() for module, imported in below.items() if module in used
        }
        inner_files = {module: imported for module, imported in inner_files.items() if imported}
        if inner_files == below:
            return {"up": up, "circles": len(below)}
        below = inner_files


def internal_imports(folder: Path) -> int:
    """Return the lines of a package that import internal modules of milvus_hubness."""
    return sum(module not in PUBLIC for source in sources(folder) for module in imported(source))


PUBLIC = {"milvus_hubness", "milvus_hubness.extending"}


def imported(source: str) -> Iterator[str]:
    """Yield the modules of milvus_hubness that a file imports from."""
    for node in ast.walk(ast.parse(source)):
        module = node.module if isinstance(node, ast.ImportFrom) else None
        if module is not None and module.split(".")[0] == "milvus_hubness":
            yield module


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", metavar="package")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    folders = [folder_of(package) for package in arguments.packages] or list(OURS)
    results: dict[str, dict[str, Any]] = {folder.name: figures(folder) for folder in folders}
    for folder in folders:
        if folder == PACKAGE:
            results[folder.name] |= arrows()
        elif folder in OURS:
            results[folder.name]["internal imports"] = internal_imports(folder)

    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    columns = list(dict.fromkeys(name for row in results.values() for name in row))
    rows = [
        [name, *(f"{row.get(column, '')}" for column in columns)] for name, row in results.items()
    ]
    print(table(["package", *columns], rows))


if __name__ == "__main__":
    main()
