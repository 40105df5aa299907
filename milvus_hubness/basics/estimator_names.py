"""The names of the estimators, without their modules, which load NumPy: `--help` needs no more.

An estimator is a class with a keyword, `class CSLS(Estimator, alias="csls")`, in a file of its
own in `correction/estimators`, or in another package, which names it as an entry point of the
group INSTALLED.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import NamedTuple

INSTALLED = "milvus_hubness.estimators"
"""The group of entry points by which a package offers estimators: `ALIAS = "MODULE:CLASS"`."""

MEASURED = {"items", "mean_bias", "agreement", "factor"}
"""Parameters that a fit sets, besides each tau of a temperature."""

FOLDER = Path(__file__).parents[1] / "correction" / "estimators"

# Read as text: an import of the files would load NumPy, and `--help` would wait for it.
_CLASS = re.compile(r'^class (\w+)\([^)]*\balias="(\w+)"', re.MULTILINE)


class Named(NamedTuple):
    """An estimator of this package."""

    alias: str
    """Its name for users."""

    class_name: str

    module: str


@cache
def own_estimators() -> tuple[Named, ...]:
    """Return the estimators of this package, as their files declare them."""
    return tuple(
        Named(alias, class_name, f"milvus_hubness.correction.estimators.{file.stem}")
        for file in sorted(FOLDER.glob("*.py"))
        for class_name, alias in _CLASS.findall(file.read_text("utf-8"))
    )


def installed_estimators() -> tuple[EntryPoint, ...]:
    """Return the estimators of other packages. This looks at all installed packages, some 10 ms."""
    return tuple(entry_points(group=INSTALLED))


def own_aliases() -> list[str]:
    return [estimator.alias for estimator in own_estimators()]
