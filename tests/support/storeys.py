"""The storeys of the package, and what each of its files imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "milvus_hubness"

STOREYS = (
    "errors",
    "basics",
    "correction",
    "quality",
    "jobs",
    "clients",
    "milvus",
    "reports",
    "api",
    "extras",
    "serve",
    "demo",
    "cli",
    "extending",
)
"""From the ground up. A file imports files of its own storey and of those below it. What extensions
may use comes from all of them, so it stands on top: no file of the package imports it."""


def storey_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def files() -> list[Path]:
    """Return the files of the package that belong to a storey."""
    return sorted(
        path for path in PACKAGE.rglob("*.py") if storey_of(path) not in {"__init__", "__main__"}
    )


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {dotted(path) for path in PACKAGE.rglob("*.py")}


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, also inside its functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
