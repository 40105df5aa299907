"""Hubness correction for cross-modal search, inside Milvus."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from milvus_hubness import errors as _errors
from milvus_hubness.basics.requirements import naming_extras as _naming_extras

_ERRORS = [
    name
    for name, kind in vars(_errors).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
]
globals().update({name: getattr(_errors, name) for name in _ERRORS})

_STUB = Path(__file__).with_suffix(".pyi").read_text("utf-8")
_IMPORT = re.compile(r"^from (\S+) import \(?\s*(\w+) as", re.MULTILINE)
_MODULES = {name: module for module, name in _IMPORT.findall(_STUB)}
"""The modules of the names that are imported when they are first used."""

__all__ = [*_MODULES, *_ERRORS, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("milvus-hubness")
    elif name in _MODULES:
        with _naming_extras():
            value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
