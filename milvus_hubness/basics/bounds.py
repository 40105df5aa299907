"""Bounds of the records that are read from a database:
the size of their JSON, and the values of their fields.

A user who may alter a collection can write anything into its properties, and one who may write to
the ledger anything into its records. So a record is validated whole when it is read, and nothing
after that has to doubt its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from milvus_hubness.errors import StateError

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_CHARACTERS = 1 << 20
"""Largest number of characters of a record. The
parser itself refuses JSON that is nested too deeply.
"""

SHOWN_CHARACTERS = 200
"""Number of characters after which a part of a
message is cut: it may contain what a stranger wrote.
"""

LARGEST = 3.4028234e38
"""Largest number of float32, in which biases are stored."""

LARGEST_STRENGTH = 1e6
"""Largest w, far beyond any useful one."""

LONGEST_NAME = 255
"""Most characters of a name: the limit of Milvus and of Qdrant."""

LONGEST_TEXT = 10_000
"""Most characters of a sentence in a record, for example the reason of a verdict."""

MOST_CANDIDATES = 16_384
"""Largest number of hits in an answer of Milvus."""

MOST_ROWS = 2**40
"""Largest number of rows, of queries or of refreshes that a record may count."""

# Types for the fields of records: pydantic refuses values outside these bounds.

Name = Annotated[str, Field(max_length=LONGEST_NAME, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""A name without control characters; Qdrant's unnamed vector has an empty one."""

CollectionName = Annotated[Name, Field(min_length=1)]
Fingerprint = Annotated[str, Field(max_length=LONGEST_NAME)]
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]

Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Strength = Annotated[float, Field(ge=-LARGEST_STRENGTH, le=LARGEST_STRENGTH, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=MOST_ROWS)]

Depth = Annotated[int, Field(ge=1, le=MOST_CANDIDATES)]
"""The k of a search."""

Moment = Annotated[
    AwareDatetime,
    Field(
        ge=datetime(2000, 1, 1, tzinfo=timezone.utc), le=datetime(9000, 1, 1, tzinfo=timezone.utc)
    ),
]
"""A time with its zone, far enough from the last year that seconds can be added to it."""

T = TypeVar("T")


class FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy as pydantic does, without what was computed from the values before."""
        copied = super().model_copy(update=update, deep=deep)
        for name in vars(copied).keys() - type(self).model_fields.keys():
            del vars(copied)[name]
        return copied

    def to_json(self) -> str:
        """Return the record as JSON.

        Raises StateError if `model_copy` gave it values that no reader accepts.
        """
        text = self.model_dump_json()
        read_record(
            type(self).model_validate_json,
            text,
            f"the new {type(self).__name__}",
            "it was not written",
        )
        return text


def read_record(validate: Callable[[str], T], text: str, what: str, remedy: str) -> T:
    """Return `validate(text)`.

    what, remedy: for messages, what the record is and how it can be repaired. Raises StateError, in
    one line that names the place in the record.
    """
    # Before the parser: it would build whatever a stranger has written.
    _expect_bounded(text, what, remedy)
    try:
        return validate(text)
    except ValidationError as error:
        raise StateError(f"{what} is broken{problem_in(error)}: {remedy}") from None


def read_value(text: str, what: str, remedy: str) -> Any:
    """Return the value of a JSON text whose form the caller checks. Raises StateError."""
    _expect_bounded(text, what, remedy)
    try:
        return from_json(text)
    except ValueError as error:
        raise StateError(f"{what} is broken: {shown(error)}: {remedy}") from None


def shown(value: object) -> str:
    """Return a text for a message: one line, without control characters, and not too long."""
    text = str(value)
    # Cut first: an escape is longer than its character.
    cut = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def _expect_bounded(text: str, what: str, remedy: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise StateError(
            f"{what} is broken: it has {len(text):,} characters, at most {MOST_CHARACTERS:,} are "
            f"read: {remedy}"
        )


def problem_in(error: ValidationError) -> str:
    """Return where the first problem is, and what it is, for the end of a message."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    # Our own exceptions and pydantic's begin differently.
    problem = first["msg"].removeprefix("Value error, ")
    return f" at {shown(place)}: {shown(problem)}" if place else f": {shown(problem)}"
