"""Experiments on live queries: which arm a search is in, and what an answer is to its outcomes."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from milvus_hubness.correction.codec.arrays import without_tensors
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.milvus.client.messages import Question, expect_strength
from milvus_hubness.milvus.client.trials import NUMBERS, Trial

WINDOW_SECONDS = 600
"""Time within which a query that is sent again stays in its arm, so that the pages of one answer fit
together."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Experiment:
    """A test on live queries: some queries get the corrected ranking, the others another one.

    A query is in the arm that a hash of the name, the query and the present ten minutes gives, in
    every client with the same settings. Raises InvalidParameter.
    """

    name: str
    """Of letters, digits, dots and dashes; each experiment of a collection has its own."""

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

    def assign(self, question: Question) -> None:
        """Put a search in the arm that its queries are in.

        It stays as it is if it names its own strength or kinds, is ranked again by a re-ranker, or
        has no vectors.
        """
        names_its_own = question.strength is not None or question.kinds is not None
        if names_its_own or question.rerank is not None or question.trial is not None:
            return
        queries = hashed_bytes(question.data)
        if queries is not None:
            # In place: a copy would take as long as the rest.
            question.trial = self.trial_of(queries)
            question.strength, question.kinds = self.settings_of(question.trial)

    def trial_of_requests(self, requests: Sequence[Any]) -> Trial | None:
        """Return the trial of a hybrid search, by the queries of its first request with vectors."""
        for request in requests:
            queries = hashed_bytes(request.data)
            if queries is not None:
                return self.trial_of(queries)
        return None

    def trial_of(self, queries: bytes, now: float | None = None) -> Trial:
        """Return the trial of these queries at this Unix time, which is the present one if None."""
        moment = time.time() if now is None else now
        window = int(moment // WINDOW_SECONDS)
        # Names have no slash, so no two experiments hash the same bytes.
        hashed = b"%b/%d/%b" % (self.name.encode(), window, queries)
        drawn = blake2b(hashed, digest_size=16).digest()

        unit = int.from_bytes(drawn[:8], "big") % NUMBERS
        # From other bits than the arm, so that each share of the answers has both arms alike.
        recorded = int.from_bytes(drawn[8:], "big") % NUMBERS < self.rate * NUMBERS
        return Trial(
            experiment=self.name,
            share=self.share,
            treated=unit < self.share * NUMBERS,
            unit=unit,
            hashed=queries,
            is_recorded=recorded,
            began=time.perf_counter(),
        )

    def settings_of(self, trial: Trial) -> tuple[float | None, float | None]:
        """Return the strength and the factor of kinds of a trial."""
        if trial.treated:
            return self.strength, None
        return self.control, 0.0 if self.control == 0 else None


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
