"""Experiments on live traffic: which arm a search is in, and what an answer is to its outcomes."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from milvus_hubness.correction.codec.arrays import Dtype, without_tensors
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.milvus.client.messages import Question, expect_strength

if TYPE_CHECKING:
    from milvus_hubness.milvus.client.state_cache import Target

WINDOW_SECONDS = 600
"""Time within which a query that is sent again stays in its arm, so that the pages of one answer fit
together."""
NUMBER_BITS = 52
"""Bits of the numbers of samples, answers and units: what a float64 holds exactly."""
NUMBERS = 1 << NUMBER_BITS

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TOKEN = re.compile(r"(?P<number>[0-9]{1,16})\.(?P<field>[^.]{1,255})\.(?P<profile>[^.]{0,255})")

CORRECTED = "corrected"
CONTROL = "control"


@dataclass(frozen=True)
class Experiment:
    """A test on live traffic: some queries get the corrected ranking, the others another one.

    A query is in the arm that a hash of the name, the query and the present ten minutes gives, in
    every client with the same settings. Raises InvalidParameter.
    """

    name: str
    """Tells experiments of one collection apart: letters, digits, dots, dashes."""

    share: float = 0.5
    """Share of the queries that get the corrected ranking."""

    strength: float | None = None
    """w of the corrected ranking; None for that of the client or the collection."""

    control: float = 0.0
    """w of the other one. 0, without kinds, is the raw ranking."""

    rate: float = 1.0
    """Share of the answers that are recorded."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidParameter(
                f"the name of an experiment is of up to 64 letters, digits, dots and dashes, not "
                f"{self.name!r}"
            )
        if not 0 < self.share < 1:
            raise InvalidParameter(f"share must be above 0 and below 1, not {self.share}")
        if not 0 < self.rate <= 1:
            raise InvalidParameter(f"rate must be above 0 and at most 1, not {self.rate}")
        expect_strength(self.strength)
        expect_strength(self.control)

    @classmethod
    def parse(cls, text: str) -> Experiment:
        """Return the experiment NAME or NAME:SHARE. Raises InvalidParameter."""
        name, separator, share = text.partition(":")
        if not separator:
            return cls(name)
        try:
            return cls(name, float(share))
        except ValueError:
            raise InvalidParameter(
                f"an experiment is NAME or NAME:SHARE, such as 2026-11:0.5, not {text!r}"
            ) from None

    def assign(self, question: Question) -> Question:
        """Return the search in the arm that its queries are in; as it is if it names its own strength
        or kinds, is ranked again by a re-ranker, or has no vectors.
        """
        names_its_own = question.strength is not None or question.kinds is not None
        if names_its_own or question.rerank is not None or question.trial is not None:
            return question
        queries = hashed_bytes(question.data)
        if queries is None:
            return question
        trial = self.trial_of(queries)
        strength, kinds = self.settings_of(trial)
        return replace(question, strength=strength, kinds=kinds, trial=trial)

    def trial_of_requests(self, requests: Sequence[Any]) -> Trial | None:
        """Return the trial of a hybrid search, by the queries of its first request with vectors."""
        for request in requests:
            queries = hashed_bytes(request.data)
            if queries is not None:
                return self.trial_of(queries)
        return None

    def trial_of(self, queries: bytes, now: float | None = None) -> Trial:
        """Return the trial of these queries at this Unix time, which is the present one if None."""
        digest = blake2b(queries, digest_size=16).digest()
        moment = time.time() if now is None else now
        window = int(moment // WINDOW_SECONDS)
        drawn = blake2b(b"%b/%d/%b" % (self.name.encode(), window, digest), digest_size=16).digest()

        unit = int.from_bytes(drawn[:8], "big") % NUMBERS
        # From other bits than the arm, so that each share of the answers has both arms alike.
        recorded = int.from_bytes(drawn[8:], "big") % NUMBERS < self.rate * NUMBERS
        return Trial(
            experiment=self.name,
            share=self.share,
            treated=unit < self.share * NUMBERS,
            unit=unit,
            query=int.from_bytes(digest[:8], "big") % NUMBERS,
            is_recorded=recorded,
            began=time.perf_counter(),
        )

    def settings_of(self, trial: Trial) -> tuple[float | None, float | None]:
        """Return the strength and the factor of kinds of a trial."""
        if trial.treated:
            return self.strength, None
        return self.control, 0.0 if self.control == 0 else None


@dataclass(frozen=True, slots=True)
class Trial:
    """One search of an experiment."""

    experiment: str
    share: float
    """Probability of the corrected arm."""
    treated: bool
    """Whether it gets the corrected ranking."""
    unit: int
    """Hash of the query and its window of time, by which arms are drawn."""
    query: int
    """Hash of the query."""
    is_recorded: bool
    began: float
    """When it began, by time.perf_counter."""

    @property
    def arm(self) -> str:
        return CORRECTED if self.treated else CONTROL


@dataclass(frozen=True, slots=True)
class Answered:
    """What an answer is to its outcomes: its arm, and where they are recorded."""

    trial: Trial | None
    """None outside of experiments."""
    number: int
    """Of its first query; the further ones have the numbers that follow."""
    queries: Sequence[Any]
    """m vectors, as they were sent."""
    offset: int
    """Rank of the first hit, from 0."""
    target: Target | None
    """Where it is recorded; None if nothing of it is."""
    dim: int
    dtype: Dtype

    @property
    def arm(self) -> str | None:
        """`corrected` or `control`; None outside of experiments."""
        return self.trial.arm if self.trial else None

    @property
    def experiment(self) -> str | None:
        return self.trial.experiment if self.trial else None

    @property
    def is_recorded(self) -> bool:
        """Whether outcomes of this answer count."""
        return self.target is not None

    def token(self, query: int = 0) -> str | None:
        """Return a short text with which an outcome can be given later and elsewhere; None if nothing
        of this answer is recorded. It has no vector and names no user.
        """
        if self.target is None:
            return None
        sampling = self.target.sampling
        return f"{self.number + query}.{sampling.field}.{sampling.profile}"

    def __repr__(self) -> str:
        return f"Answered(arm={self.arm!r}, experiment={self.experiment!r})"


@dataclass(frozen=True)
class Token:
    """A token's content."""

    number: int
    field: str
    profile: str

    @classmethod
    def parse(cls, text: str) -> Token:
        """Raises InvalidParameter for a text that is no token."""
        match = _TOKEN.fullmatch(text)
        number = int(match["number"]) if match else NUMBERS
        if match is None or number >= NUMBERS:
            raise InvalidParameter(
                f"{text[:80]!r} is no token of an answer: pass what answer_token returned"
            )
        return cls(number, match["field"], match["profile"])


def expect_kind(kind: str) -> None:
    """Raise InvalidParameter unless this can be the kind of an outcome."""
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise InvalidParameter(
            f"the kind of an outcome is a word of up to 32 small letters, such as click, not {kind!r}"
        )


HASHED = 64
"""Components of a query that are hashed, spread evenly: all of them would take longer than the rest of
an arm. Queries that differ in none of them share their arm."""


def hashed_bytes(data: Any) -> bytes | None:
    """Return what of queries is hashed, equal for equal vectors as lists and as arrays of any type of
    number; None for what are no vectors.
    """
    try:
        return b"".join(map(_row_bytes, without_tensors(data)))
    except (TypeError, ValueError, OverflowError):
        return None


def _row_bytes(row: Any) -> bytes:
    if isinstance(row, bytes):
        return row
    some = row[:: len(row) // HASHED + 1]
    if isinstance(some, np.ndarray):
        return some.astype(np.float32).tobytes()
    return array("f", some).tobytes()


def copied(data: Any) -> list[Any]:
    """Return the queries as they are now: the caller may use its arrays for the next ones."""
    rows = without_tensors(data)
    return [row if isinstance(row, bytes) else row.copy() for row in rows]
