"""Answers whose outcomes are recorded, their tokens, and the records of both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from milvus_hubness.correction.codec.arrays import Dtype, without_tensors
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.jobs.store.records import (
    ANSWER,
    LONGEST_CHOSEN_KEY,
    OUTCOME,
    AnswerFacts,
    OutcomeFacts,
    Sample,
    Sampling,
    TrialFacts,
    recorded_key,
)
from milvus_hubness.milvus.client.query_samples import Target, stored_vector
from milvus_hubness.milvus.client.trials import NUMBERS, Trial

MOST_ANSWERS = 1_000_000
"""Places for the answers of experiments in a collection."""
MOST_KEYS = 10
"""Keys of an answer that are recorded: the report counts hubs among them, and finds ranks of clicks."""

_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TOKEN = re.compile(r"(?P<number>[0-9]{1,16})\.(?P<field>[^.]{1,255})\.(?P<profile>.{0,255})")
"""The number, the field and the profile, whose name may have dots, which that of a field has not."""


# Not frozen, as each answer makes one.
@dataclass(slots=True)
class Answered:
    """What an answer is to its outcomes: its arm, and where they are recorded."""

    trial: Trial | None
    """None outside of experiments."""
    number: int
    """Of its first query; the further ones have the numbers that follow."""
    queries: Sequence[Any]
    """m vectors, as they were sent; none if nothing of it is recorded."""
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
        """Return a short text that stands for the answer, for a click that comes later or in another
        process; None if nothing of this answer is recorded. It has no vector and names no user.
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
                f"{text[:80]!r} is no token of an answer: pass what answer.hubness.token() returned"
            )
        return cls(number, match["field"], match["profile"])


def expect_kind(kind: str) -> None:
    """Raise InvalidParameter unless this can be the kind of an outcome."""
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise InvalidParameter(
            f"the kind of an outcome is a word of up to 32 small letters, such as click, not {kind!r}"
        )


def answer_of(
    answered: Answered, query: int, keys: Sequence[Any], milliseconds: float, at: int
) -> Sample | None:
    """Return the record of an answer to one of its queries; None if its vector cannot be stored.

    keys: of its first hits, in their order.
    """
    vector = stored_vector(answered.queries[query], answered.dim, answered.dtype)
    if answered.target is None or vector is None:
        return None
    sampling = answered.target.sampling

    trial = answered.trial
    facts = AnswerFacts(
        keys=tuple(recorded_key(key) for key in keys),
        offset=answered.offset,
        trial=None if trial is None else _facts_of(trial, milliseconds),
    )
    number = answered.number + query
    place = number % (sampling.capacity if trial is None else MOST_ANSWERS)
    return Sample(sampling.profile, place, number, at, vector, ANSWER, facts.model_dump_json())


def _facts_of(trial: Trial, milliseconds: float) -> TrialFacts:
    return TrialFacts(
        experiment=trial.experiment,
        share=trial.share,
        treated=trial.treated,
        unit=trial.unit,
        query=trial.query,
        milliseconds=milliseconds,
    )


def outcome_of(
    sampling: Sampling, dim: int, number: int, key: Any, kind: str, rank: int, at: int
) -> Sample:
    """Return the record of an outcome. number: of the answer. rank: from 1; 0 if it is not known.

    The same outcome twice has the same place, so that a double click is one.
    """
    chosen = recorded_key(key, LONGEST_CHOSEN_KEY)
    facts = OutcomeFacts(key=chosen, kind=kind, rank=rank).model_dump_json()
    digest = blake2b(f"{number}/{facts}".encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "big") % MOST_ANSWERS
    return Sample(sampling.profile, place, number, at, np.zeros(dim, np.float32), OUTCOME, facts)


def copied(data: Any) -> list[Any]:
    """Return the queries as they are now: the caller may use its arrays for the next ones."""
    rows = without_tensors(data)
    return [row if isinstance(row, bytes) else row.copy() for row in rows]
