"""A prior: how often each item is wanted, as a number that is added to its score.

    score(q, r) = s(q, r) − b(r) + λ · log p(r)        p(r) ∝ value(r) + added

b(r), which corrects hubs, pushes down whatever many queries are near to, popular items too. A prior
says which items are wanted often, from a field of the rows or from a log of clicks. λ·log p(r) is
one number per item, so it is stored with the bias: b(r) − λ·log p(r).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from milvus_hubness.basics.bounds import LONGEST_NAME, FrozenModel, Name, Number
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.items import ItemRows
from milvus_hubness.errors import InvalidInput, InvalidParameter

Values = npt.NDArray[np.float64]
Clicks = Mapping[Key, float]
"""How often each key was the right one; keys that it lacks never were."""

SMOOTHING = 1 / 3
"""What is added to each value, as a share of the mean value.

A share, not a number: the result must not depend on whether sales are counted in pieces or in
thousands. With a third, an item without any click counts a quarter of an average one: where clicks
are few, and whether an item has one is chance, that decides little.
"""

STEADY = 0.1
"""How much a parameter may differ, as a share, from what the values give now.

A refresh leaves it as it is then: with each change, all rows would be written again.
"""

LARGEST_WEIGHT = 10.0
"""Largest λ, in units of the spread of scores; those that help are below 1."""

LARGEST_VALUE = 1e100
"""Largest value of a row: sums of them are finite."""

REMEDY = "a prior needs a number from 0 up, or none, which counts as 0"


Weight = Annotated[float, Field(ge=0, le=LARGEST_WEIGHT, allow_inf_nan=False)]


class Prior(FrozenModel):
    """A prior of a profile's biases, as the collection state has it.

    A new one has the parameters of no gallery yet and changes no score; `of_gallery` and
    `with_factor` measure them.
    """

    source: Literal["field", "pairs"]
    """Where the values come from: a field of the rows, or clicks that are stored with the bank."""
    field: Name = ""
    """The field of the rows; empty for clicks."""
    weight: Weight = 0.0
    """λ in units of the spread of scores."""
    factor: Number = Field(default=0.0, ge=0)
    """λ in units of scores, as the last fit measured their spread."""
    added: float = Field(default=1.0, gt=0, le=LARGEST_VALUE, allow_inf_nan=False)
    """What is added to each value, so that no item is impossible."""
    mean_log: Number = 0.0
    """The mean of log(1 + value/added) over the gallery: the numbers have the mean 0."""
    digest: str = Field(default="", max_length=LONGEST_NAME)
    """Digest of the gallery's values, by which a refresh sees that some have changed."""

    @model_validator(mode="after")
    def _expect_field(self) -> Prior:
        if (self.source == "field") != bool(self.field):
            raise InvalidParameter(
                f"prior.field is {self.field!r}, for a prior from {self.source!r}"
            )
        return self

    @property
    def subject(self) -> tuple[str, str]:
        """What the prior is about."""
        return self.source, self.field

    @property
    def words(self) -> str:
        """The source in words."""
        return f"field {self.field!r}" if self.source == "field" else "clicks"

    def facts(self, keys: int = 0) -> dict[str, object]:
        """Return the prior as plain data. keys: number of those with clicks."""
        facts: dict[str, object] = self.model_dump(
            include={"source", "field", "weight", "factor", "added"}
        )
        if self.source == "pairs" and keys:
            facts["keys"] = keys
        return facts

    def of(self, values: npt.ArrayLike) -> Floats:
        """Return what is added to the biases of items with these values (n,), float32 (n,).

        It is −λ·log p(r), centred.
        """
        logs = np.log1p(np.asarray(values, np.float64) / self.added)
        return np.asarray(self.factor * (self.mean_log - logs), np.float32)

    def values_of(self, items: ItemRows, clicks: Clicks) -> Values:
        """Return the values of items, (n,); `clicks` are those of a prior from clicks.

        Raises InvalidInput, which names the first row whose field holds something else.
        """
        if self.source == "pairs":
            return np.array([clicks.get(key, 0.0) for key in items.keys], np.float64)

        values = [row.get(self.field) for row in items.rows]
        for position, problem in problems_in(values):
            raise InvalidInput(unusable(items.keys[position], self.field, problem))
        return np.array([value or 0 for value in values], np.float64)

    def of_gallery(self, values: Values, digest: str = "") -> Prior:
        """Return the prior with the parameters that follow from the values of all items, (n,)."""
        mean = float(values.mean()) if len(values) else 0.0
        # Without any click, all items are alike, whatever is added.
        added = SMOOTHING * mean or self.added
        if self.is_near(self.added, added) and self.digest:
            added = self.added

        logs = np.log1p(values / added)
        mean_log = float(logs.mean()) if len(logs) else 0.0
        deviation = float(logs.std()) if len(logs) else 0.0
        # Another mean moves all numbers and no ranking.
        if (
            added == self.added
            and abs(mean_log - self.mean_log) <= STEADY * deviation
            and self.digest
        ):
            mean_log = self.mean_log
        return self.model_copy(update={"added": added, "mean_log": mean_log, "digest": digest})

    def with_factor(self, spread: float) -> Prior:
        """Return the prior for scores of this spread."""
        factor = self.weight * spread
        if self.is_near(self.factor, factor):
            factor = self.factor
        return self.model_copy(update={"factor": factor})

    @staticmethod
    def is_near(former: float, new: float) -> bool:
        """Whether a parameter may stay as it is."""
        return abs(new - former) <= STEADY * abs(former)


def unusable(row: object, field: str, problem: str) -> str:
    """Return the message about a row whose value no prior can use."""
    return f"row {row!r} has a {field!r} that is {problem}: {REMEDY}"


def problems_in(values: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """Yield the position of each value that cannot be one of a prior, and what is wrong with it."""
    for position, value in enumerate(values):
        if value is not None and (problem := problem_of(value)):
            yield position, problem


def problem_of(value: Any) -> str:
    """Return what is wrong with a value; empty for a number from 0 up."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral | Real):
        return "not a number"
    try:
        number = float(value)
    except OverflowError:
        return "too large"
    if not math.isfinite(number):
        return "not finite"
    if number < 0:
        return "negative"
    return "too large" if number > LARGEST_VALUE else ""


def digest_of(keys: Sequence[Key], values: Values) -> int:
    """Return a digest of the values of these keys; those of several pages add up.

    Keys with the value 0 do not count, so that new rows without a click change nothing.
    """
    total = 0
    for position in np.flatnonzero(values).tolist():
        text = f"{keys[position]!r}:{values[position]!r}"
        total += int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return total % 2**64


def checked_clicks(clicks: Mapping[Any, Any]) -> dict[Key, float]:
    """Return clicks by key. Raises InvalidInput for keys or numbers that are none."""
    for key, value in clicks.items():
        if isinstance(key, bool) or not isinstance(key, int | str):
            raise InvalidInput(f"clicks are by key, a whole number or a text, not {key!r}")
        if problem := problem_of(value):
            raise InvalidInput(f"the clicks of {key!r} are {problem}: {REMEDY}")
    if not clicks:
        raise InvalidInput("there are no clicks: pass some, or no prior")
    return {key: float(value) for key, value in clicks.items() if value}
