"""Test files whose assertions pytest has rewritten, before there are workers: in a fresh clone each of them would spend
ten seconds on all files."""

import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.abc import Loader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def keep_rewritten(files: Iterable[Path], loader: Loader) -> None:
    """Have pytest's loader rewrite files, as far as it has not, and keep the bytecode where workers look for it."""
    if sys.dont_write_bytecode:
        return
    for path in files:
        spec = spec_from_file_location(path.stem, path, loader=loader)
        assert spec
        module = module_from_spec(spec)
        # The loader also runs the file, which ends at its first import.
        module.__dict__["__builtins__"] = {}
        with suppress(ImportError):
            loader.exec_module(module)
