"""The extras of this package that a command needs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from milvus_hubness.basics.requirements import EXTRAS, install_line
from milvus_hubness.errors import MissingExtra

OF_COMMANDS = {
    # Without torch, NumPy computes.
    **dict.fromkeys(("check", "tune", "hubs", "match"), ("check",)),
    **dict.fromkeys(("bank", "experiment"), ("check",)),
    # They would run without torch too, but rewrite whole collections.
    **dict.fromkeys(("enable", "disable", "refresh", "migrate", "sweep", "quari"), ("jobs",)),
    "serve": ("serve",),
    "demo": ("jobs", "lite"),
}
"""The extras of each command that needs more than a base install."""
WITHIN = {"serve": "jobs", "jobs": "check"}
"""Extras that install another one too."""
VERSIONED = {"tomli": (3, 11)}
"""Modules that Python itself has from this version on, under another name."""


def with_all_extras(error: MissingExtra, arguments: Sequence[str], uri: str) -> MissingExtra:
    """Return the error for a command line, with all extras that it lacks.

    arguments: those of the program. uri: the address of the database.
    """
    # The error names the first missing module. The next one would be missing after an installation,
    # so all that the command line will need is named at once.
    command = next((argument for argument in arguments if argument in OF_COMMANDS), "")
    extras = {error.extra, *OF_COMMANDS.get(command, ())}
    if uri.endswith(".db"):
        extras.add("lite")

    missing = {extra: modules for extra in extras if (modules := _missing_modules(extra))}
    # An extra that another one installs need not be named with it.
    included = {inner for extra in missing for inner in _all_within(extra) if inner != extra}
    named = sorted(missing.keys() - included) or [error.extra]

    modules = sorted({module for group in missing.values() for module in group})
    if len(modules) < 2:
        return error

    return MissingExtra(
        f"{', '.join(modules)} are not installed: {install_line(','.join(named))}",
        named[0],
    )


def _missing_modules(extra: str) -> list[str]:
    """Return the modules of an extra, and of those within it, that are not installed."""
    return [module for module in _modules_of(_all_within(extra)) if not _is_installed(module)]


def _all_within(extra: str) -> list[str]:
    """Return an extra, then those that it installs too."""
    extras = [extra]
    while extras[-1] in WITHIN:
        extras.append(WITHIN[extras[-1]])
    return extras


def _modules_of(extras: Iterable[str]) -> list[str]:
    named = set(extras)
    return [
        module
        for module, extra in EXTRAS.items()
        if extra in named and sys.version_info < VERSIONED.get(module, (99,))
    ]


def _is_installed(module: str) -> bool:
    # `find_spec` raises for a module that is loaded without a spec.
    if module in sys.modules:
        return sys.modules[module] is not None
    return find_spec(module) is not None
