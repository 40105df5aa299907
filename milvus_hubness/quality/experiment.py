"""A test on live users: whether one of two randomised arms has more success. Numbers only.

**What is assumed.** Arms are randomised unit by unit, so both have the same users, the same pages and
the same habit of clicking on what stands first: no model of position bias is needed, as it is the
same in both. Beyond that, successes stand for what users want; the arm of one unit changes neither
other units nor how many rows a unit has; and all rows of both arms arrive, or are lost alike. The
number of units of each arm is compared with the share, since the last is what fails most often.

**When.** A report may be made at any time and as often as one likes: see `confidence_sequence`. There
is no verdict before each arm has EFFECTIVE_UNITS and RARE_UNITS, because the intervals rest on a
normal approximation. `benchmarks/experiment.py` shows how often verdicts are right, and after how many
rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.errors import InvalidInput, InvalidParameter
from milvus_hubness.quality.confidence_sequence import (
    Difference,
    boundary,
    difference_of_arms,
    effective_units,
    mixture_scale,
)

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float64]

EFFECTIVE_UNITS = 50
"""Effective units of the smaller arm, by its share, below which there is no verdict."""
RARE_UNITS = 25
"""Units with a success, and as many with a failure, of the smaller arm, by its share, below which there
is no verdict.

Both are a margin for users unlike the simulated ones, where alike arms have no more winners without
them (`benchmarks/experiment.py`)."""
SHARE_ALPHA = 0.001
"""Probability that arms of the right share are ever called wrong."""
SHARE_UNITS = 1_000
"""Units at which a wrong share is noticed soonest."""

Verdict = Literal["treatment is better", "control is better", "no difference proven yet"]
TREATMENT: Verdict = "treatment is better"
CONTROL: Verdict = "control is better"
UNPROVEN: Verdict = "no difference proven yet"


class Units(NamedTuple):
    """The units of an experiment."""

    sizes: Integers
    """(u,) numbers of rows."""

    treated: Flags
    """(u,) whether the unit is of the treatment, else of the control."""

    sums: Values
    """(u,) sums of the successes of the rows."""


@dataclass(frozen=True)
class Arm:
    """What the units of one arm did."""

    name: str

    rows: int

    units: int

    success: float
    """Mean success of a row."""


@dataclass(frozen=True)
class ExperimentReport(ShownAsTable):
    """Both arms, their difference, and the verdict."""

    verdict: Verdict

    reason: str
    """Why, in one sentence; without a verdict, what is missing for one."""

    control: Arm

    treatment: Arm

    difference: Difference | None
    """Treatment less control, in the mean success of a row; None for fewer than three units. It
    differs a little from the difference of the means above: it is the estimator by inverse
    probabilities."""

    alpha: float
    """Probability that the interval of the difference ever misses the true one, over all looks."""

    share: float
    """Probability of the treatment."""

    effective_units: float
    """Units of equal size that would vary as much as those of both arms."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        difference = None if self.difference is None else self.difference._asdict()
        return {**asdict(self), "difference": difference}

    def __str__(self) -> str:
        arms = (self.control, self.treatment)
        names = [arm.name for arm in arms]
        width = max(12, *(2 + len(name) for name in names))
        lines = [
            _line("", names, width),
            _line("units", [f"{arm.units:,}" for arm in arms], width),
            _line("rows", [f"{arm.rows:,}" for arm in arms], width),
            _line("success", [f"{arm.success:.4f}" for arm in arms], width),
        ]
        if self.difference is not None:
            estimate, low, high = self.difference
            level = f"{1 - self.alpha:.0%} at all looks"
            lines.append(f"difference  {estimate:+.4f} ({low:+.4f} to {high:+.4f}, {level})")
        return "\n".join([*lines, "", f"{self.verdict}: {self.reason}"])


def compare_arms(
    unit: Integers,
    treated: Flags,
    success: Values,
    *,
    names: Sequence[str] = ("control", "treatment"),
    share: float = 0.5,
    alpha: float = 0.05,
) -> ExperimentReport:
    """Return the report of an experiment, which may be made at any time.

    unit: (n,) numbers of the randomised units. treated: (n,), the same for all rows of a unit.
    success: (n,) from 0 to 1. names: of the control and the treatment. share: the probability of the
    treatment. alpha: see `ExperimentReport.alpha`. Raises InvalidParameter for a share or an alpha
    outside 0 to 1, and InvalidInput for an arm without rows.
    """
    for name, value in (("share", share), ("alpha", alpha)):
        if not 0 < value < 1:
            raise InvalidParameter(f"{name} must be above 0 and below 1, not {value}")
    for name, is_there in zip(names, (not treated.all(), treated.any()), strict=True):
        if not is_there:
            raise InvalidInput(f"arm {name!r} has no rows: report again when both arms have some")

    units = _by_unit(unit, treated, success)
    control = _arm(names[0], units, is_treatment=False)
    treatment = _arm(names[1], units, is_treatment=True)
    difference = difference_of_arms(units.sums, units.sizes, units.treated, share, alpha)

    verdict = UNPROVEN
    reason = _missing(control, treatment, units, share)
    if not reason:
        assert difference is not None, "arms with enough units have a difference"
        if difference.low > 0:
            verdict = TREATMENT
        elif difference.high < 0:
            verdict = CONTROL
        reason = _reason(treatment.name, difference, verdict, len(unit))

    return ExperimentReport(
        verdict=verdict,
        reason=reason,
        control=control,
        treatment=treatment,
        difference=difference,
        alpha=alpha,
        share=share,
        effective_units=effective_units(units.sizes),
    )


def _by_unit(unit: Integers, treated: Flags, success: Values) -> Units:
    _, first, number = np.unique(unit, return_index=True, return_inverse=True)
    return Units(
        sizes=np.bincount(number),
        treated=treated[first],
        sums=np.bincount(number, success).astype(np.float64),
    )


def _arm(name: str, units: Units, *, is_treatment: bool) -> Arm:
    in_arm = units.treated == is_treatment
    rows = int(units.sizes[in_arm].sum())
    return Arm(
        name=name,
        rows=rows,
        units=int(in_arm.sum()),
        success=float(units.sums[in_arm].sum()) / rows,
    )


def _missing(control: Arm, treatment: Arm, units: Units, share: float) -> str:
    """Return what is missing for a verdict; empty if nothing is.

    Neither number of units, of successes nor of failures says which arm is better, so that waiting
    for them favours none.
    """
    if wrong_share := _wrong_share(control, treatment, share):
        return wrong_share

    # By the share, not by the units that the smaller arm has: of few large units it may have none by
    # chance, and what it lacks would not show.
    smaller = min(share, 1 - share)
    effective = effective_units(units.sizes) * smaller
    if effective < EFFECTIVE_UNITS:
        return (
            f"the smaller arm has {effective:.1f} effective units of {EFFECTIVE_UNITS} that are "
            "needed: wait for more units"
        )

    # If one arm has hardly any successes because it is so much worse, that must be able to show.
    needed = math.ceil(RARE_UNITS / smaller)
    for name, count in (
        ("success", int((units.sums > 0).sum())),
        ("failure", int((units.sums < units.sizes).sum())),
    ):
        if not count:
            return f"no unit has a {name}: is it logged?"
        if count < needed:
            return f"{count:,} units have a {name}, and {needed:,} are needed: wait for more units"
    return ""


def _wrong_share(control: Arm, treatment: Arm, share: float) -> str:
    """Return that the arms do not have the share of the units that they should; empty if they do."""
    units = control.units + treatment.units
    per_unit = share * (1 - share)
    scale = mixture_scale(SHARE_UNITS * per_unit, SHARE_ALPHA)
    surplus = treatment.units - share * units
    if abs(surplus) <= boundary(units * per_unit, scale, SHARE_ALPHA):
        return ""
    return (
        f"{treatment.name!r} has {treatment.units / units:.1%} of the units, and a share of "
        f"{share:.0%} was set: pass the share that was drawn; if it is this one, rows of one arm are "
        "lost, and a new experiment is needed"
    )


def _reason(name: str, difference: Difference, verdict: Verdict, rows: int) -> str:
    """Return why this is the verdict. name: of the treatment. rows: those so far."""
    estimate, low, high = difference
    differs = (
        f"success with {name!r} differs by {estimate:+.4f}, between {low:+.4f} and {high:+.4f}"
    )
    if verdict != UNPROVEN:
        return differs
    return f"{differs}; {rows:,} rows can show differences from {difference.half_width:.4f} on"


def _line(name: str, cells: Sequence[str], width: int) -> str:
    return f"{name:<10}{''.join(cell.rjust(width) for cell in cells)}"
