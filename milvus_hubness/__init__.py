"""Hubness correction for cross-modal search, inside Milvus."""

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from milvus_hubness import errors as _errors

_ERRORS = [name for name, kind in vars(_errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
globals().update({name: getattr(_errors, name) for name in _ERRORS})

_STUB = Path(__file__).with_suffix(".pyi").read_text("utf-8")
_MODULES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, re.MULTILINE)}
"""The modules of the names that are imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("milvus-hubness")
    elif name in _MODULES:
        with _errors.naming_extras():
            value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_MODULES, *_ERRORS, "__version__"])


class _Package(ModuleType):
    """Python binds each imported submodule to a name of its package; `enable` and `refresh` stay functions."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _MODULES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
