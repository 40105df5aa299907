"""The report on a test on live users, from a table of a team's own log."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from milvus_hubness.basics.bounds import shown
from milvus_hubness.basics.files.columns import (
    ARRAY,
    FORMATS,
    Columns,
    columns_of_frame,
    format_of,
    open_columns,
    unknown_kind,
)
from milvus_hubness.errors import InvalidInput, UnreadableFile, name_some
from milvus_hubness.quality.experiment import (
    ExperimentReport,
    Flags,
    Integers,
    Values,
    compare_arms,
)

UNIT = "unit"
ARM = "arm"
SUCCESS = "success"

USUAL_CONTROLS = ("control", "raw")
"""Names of an arm that is the control unless another one is named."""

TRUTHS = {"true": 1.0, "false": 0.0}


def experiment_report(
    table: Any, *, control: str | None = None, share: float = 0.5, alpha: float = 0.05
) -> ExperimentReport:
    """Compare the successes of two arms of users, at any time and as often as one likes.

    table: the path of a CSV, Parquet, Arrow, .npz or JSON lines file, or a frame of pandas, Polars
    or Arrow, with a row for each search, or whatever else succeeds or fails:

    - `unit`, a text or a whole number: what was put into an arm, such as a user or a session. The
      successes of one unit depend on each other, and count as one draw.
    - `arm`, one of two texts or whole numbers, the same in all rows of a unit.
    - `success`, true or false, or a number from 0 to 1, such as 1 / rank of the click.

    control: the arm that the other one is compared with; by default the one named `control` or
    `raw`. share: the probability with which a unit was put into the other arm. alpha: the
    probability that the interval of the difference ever misses the true one, however often one
    looks. Raises InvalidInput and UnreadableFile, which name the column and the row, and
    InvalidParameter.
    """
    with _opened(table) as columns:
        _expect_columns(columns)
        units = _units_of(columns)
        arms = [_name_of(arm, ARM, row, columns) for row, arm in enumerate(columns.values(ARM))]
        success = _successes_of(columns)

    if not len(units) == len(arms) == len(success):
        raise InvalidInput(
            f"{columns.source} has {len(units)} units, {len(arms)} arms and {len(success)} "
            "successes: each row has one of each"
        )
    names = _control_and_treatment(arms, control, columns.source)
    treated = np.array([arm == names[1] for arm in arms], np.bool_)
    numbers: dict[str, int] = {}
    number_of = np.array([numbers.setdefault(unit, len(numbers)) for unit in units], np.int64)
    _expect_one_arm_each(number_of, treated, list(numbers), columns.source)
    return compare_arms(number_of, treated, success, names=names, share=share, alpha=alpha)


def _opened(table: Any) -> AbstractContextManager[Columns]:
    if not isinstance(table, str | os.PathLike):
        return nullcontext(columns_of_frame(table, "the table"))
    path = Path(table)
    # An array has no columns of different types.
    formats = [suffix for suffix in FORMATS if suffix != ARRAY]
    if format_of(path) not in formats:
        raise UnreadableFile(unknown_kind(path, "a table", formats))
    return open_columns(path, "a table")


def _expect_columns(columns: Columns) -> None:
    missing = [name for name in (UNIT, ARM, SUCCESS) if name not in columns.names]
    if missing:
        there = name_some([repr(shown(name)) for name in columns.names], limit=20)
        raise InvalidInput(
            f"{columns.source} has no column {', '.join(map(repr, missing))}, only {there}: rename "
            "or add it"
        )


def _units_of(columns: Columns) -> list[str]:
    return [_name_of(unit, UNIT, row, columns) for row, unit in enumerate(columns.values(UNIT))]


def _name_of(value: Any, column: str, row: int, columns: Columns) -> str:
    """Return a unit or an arm as a text. Raises InvalidInput for what is neither text nor number."""
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise InvalidInput(
            f"{column!r} of {columns.source} must hold texts or whole numbers, not "
            f"{reprlib.repr(value)} ({columns.place(row)})"
        )
    return str(value)


def _successes_of(columns: Columns) -> Values:
    values = columns.numbers(SUCCESS)
    successes = np.empty(len(values))
    for row, value in enumerate(values):
        number = TRUTHS.get(value.strip().lower()) if isinstance(value, str) else value
        # NaN is in no range.
        if not isinstance(number, int | float) or not 0 <= number <= 1:
            raise InvalidInput(
                f"{SUCCESS!r} of {columns.source} must hold true, false or numbers from 0 to 1, not "
                f"{reprlib.repr(value)} ({columns.place(row)})"
            )
        successes[row] = number
    return successes


def _control_and_treatment(
    arms: Sequence[str], control: str | None, source: str
) -> tuple[str, str]:
    """Return the names of both arms. Raises InvalidInput unless there are two."""
    names = list(dict.fromkeys(arms))
    listed = name_some([repr(shown(name)) for name in names])
    if len(names) != 2:
        problem = f"arms, {listed}" if len(names) > 1 else f"arm, {listed}" if names else "rows"
        count = len(names) or "no"
        raise InvalidInput(f"{source} has {count} {problem}: an experiment has rows of two arms")
    if control is not None and control not in names:
        raise InvalidInput(f"{source} has no arm {control!r}, only {listed}: choose one of these")

    usual = [name for name in names if name.lower() in USUAL_CONTROLS]
    if control is None and len(usual) != 1:
        raise InvalidInput(
            f"{source} has arms {listed}: say with --control-arm which one is the control"
        )
    chosen = control if control is not None else usual[0]
    return chosen, next(name for name in names if name != chosen)


def _expect_one_arm_each(unit: Integers, treated: Flags, names: Sequence[str], source: str) -> None:
    """Raise InvalidInput if a unit has rows of both arms."""
    in_treatment = np.bincount(unit, treated)
    mixed = np.flatnonzero((in_treatment > 0) & (in_treatment < np.bincount(unit))).tolist()
    if len(mixed):
        named = name_some([repr(shown(names[number])) for number in mixed])
        raise InvalidInput(
            f"{source} has rows of both arms for unit {named}: a unit is what was put into an arm, "
            "and stays in it; name that as the unit, or leave these rows out"
        )
