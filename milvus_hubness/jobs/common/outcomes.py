"""Outcomes of live answers, such as clicks: as pairs, as a prior, and answer by answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from pydantic import ValidationError

from milvus_hubness.basics.logs import log
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.errors import InvalidInput
from milvus_hubness.jobs.common.judgements import Judgements
from milvus_hubness.jobs.common.samples import sampling_of
from milvus_hubness.jobs.store.protocols import QuerySampling, Store, capability
from milvus_hubness.jobs.store.records import ANSWER, OUTCOME, AnswerFacts, OutcomeFacts

OUTCOMES = "outcomes"
"""The name of pairs that are read from the outcomes of the collection itself, not from a file."""

Facts = TypeVar("Facts", AnswerFacts, OutcomeFacts)


@dataclass(frozen=True, eq=False)
class RecordedAnswer:
    """An answer whose outcomes are recorded."""

    vector: Floats
    """(d,) the query."""
    at: int
    """Unix time of the query, in seconds."""
    facts: AnswerFacts
    """What the client recorded of it."""
    outcomes: Sequence[tuple[Key, int]]
    """The key and the rank, from 1, of each hit that the user chose."""

    @property
    def best_rank(self) -> int:
        """The best rank that was chosen; 0 for none."""
        return min((rank for _, rank in self.outcomes), default=0)

    @property
    def weight(self) -> float:
        """1 / the probability of its arm, so that both arms of an experiment count alike."""
        trial = self.facts.trial
        if trial is None:
            return 1.0
        return 1 / (trial.share if trial.treated else 1 - trial.share)


def recorded_answers(
    store: Store,
    collection: str,
    *,
    field: str | None = None,
    profile: str | None = None,
    kind: str = "click",
) -> list[RecordedAnswer]:
    """Return the recorded answers of a field with their outcomes of this kind, in order of time.

    Outcomes of an answer that is not there count nothing, and neither do records that somebody has
    broken, which are counted in the log. Raises CollectionNotFound, and InvalidInput if no outcomes
    are recorded.
    """
    sampler = capability(store, QuerySampling)
    info = store.info(collection, counted=False)
    sampling = sampling_of(info, field, profile)
    if sampling is None:
        raise InvalidInput(
            f"no outcomes of {info.name!r} are recorded: start with milvus-hubness bank sample "
            f"{info.name} --outcomes 1"
        )

    name = sampling.samples_collection
    answers = sampler.read_query_samples(name, sampling.profile, event=ANSWER)
    outcomes = sampler.read_query_samples(name, sampling.profile, event=OUTCOME)
    answers_facts = [_read(AnswerFacts, text) for text in answers.facts]
    outcomes_facts = [_read(OutcomeFacts, text) for text in outcomes.facts]
    broken = [*answers_facts, *outcomes_facts].count(None)
    if broken:
        log.warning("%d records in %r are broken and count nothing", broken, name)

    chosen: dict[int, list[OutcomeFacts]] = defaultdict(list)
    for number, outcome in zip(outcomes.origins.numbers.tolist(), outcomes_facts, strict=True):
        if outcome is not None and outcome.kind == kind:
            chosen[number].append(outcome)

    recorded = []
    origins = answers.origins
    for row in np.argsort(origins.at, kind="stable"):
        facts = answers_facts[row]
        if facts is None:
            continue
        ranked = [
            (outcome.key, outcome.rank or facts.rank_of(outcome.key))
            for outcome in chosen[int(origins.numbers[row])]
        ]
        recorded.append(RecordedAnswer(answers.vectors[row], int(origins.at[row]), facts, ranked))
    return recorded


def _read(model: type[Facts], text: str) -> Facts | None:
    """Return a record; None for one that somebody has broken."""
    try:
        return model.model_validate_json(text)
    except ValidationError:
        return None


def judgements_of_outcomes(
    store: Store,
    collection: str,
    *,
    field: str | None = None,
    profile: str | None = None,
    kind: str = "click",
) -> Judgements:
    """Return what users chose as right rows, each query as often as it was sent.

    Users choose among what they are shown, so outcomes favour the ranking that showed it. Those of
    an experiment count by 1 / the probability of their arm (Horvitz and Thompson, 1952): both arms
    favour their own ranking alike. Raises as `recorded_answers`, and InvalidInput without outcomes.
    """
    answers = recorded_answers(store, collection, field=field, profile=profile, kind=kind)
    useful = [answer for answer in answers if answer.outcomes]
    if not useful:
        raise InvalidInput(
            f"no outcome of the kind {kind!r} is recorded of {collection!r}: call "
            "HubnessClient.feedback when a user chooses a hit"
        )

    queries = QueryBank(np.stack([answer.vector for answer in useful]), source=OUTCOMES)
    keys = [[key for key, _ in answer.outcomes] for answer in useful]
    weights = [answer.weight for answer in useful]
    if one_sided(useful):
        log.warning(
            "all outcomes of %r are of one ranking, which they favour: those of an experiment are of two",
            collection,
        )
    are_even = max(weights) - min(weights) < 1e-9
    return Judgements.of(queries, keys, weights=None if are_even else weights)


def one_sided(answers: Sequence[RecordedAnswer]) -> bool:
    """Whether all outcomes are of one ranking, which they then favour."""
    arms = {
        answer.facts.trial.treated if answer.facts.trial else None
        for answer in answers
        if answer.outcomes
    }
    return len(arms) < 2
