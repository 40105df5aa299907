"""What packages outside of milvus_hubness may use of it, in addition to its public names.

A package that adds a database, an estimator or a learned stage imports from `milvus_hubness` and from
here, and from no other module: those move without notice. The page docs/concepts/extending.md
explains the names, and what is promised between versions.

The stub of this file lists them, and where each one is defined. A name is imported when it is
first used, so that a client loads nothing of a job, and the help of a command no NumPy.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from milvus_hubness.basics.requirements import naming_extras as _naming_extras

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8"))
_PLACES = {
    imported.asname or imported.name: (statement.module or "", imported.name)
    for statement in _STUB.body
    if isinstance(statement, ast.ImportFrom)
    for imported in statement.names
}
"""For each name the module that defines it, and its name there."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    module, defined = _PLACES[name]
    with _naming_extras():
        value = getattr(import_module(module), defined)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_PLACES)
