"""Samples of queries, of answers and of outcomes, as a client takes them from its searches."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from milvus_hubness.basics.logs import log
from milvus_hubness.correction.codec.arrays import Dtype, without_tensors
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import InvalidInput
from milvus_hubness.jobs.store.records import FieldSampling, Sampling
from milvus_hubness.milvus.client.answers import (
    MOST_KEYS,
    Answered,
    Token,
    answer_of,
    copied,
    expect_kind,
    outcome_of,
)
from milvus_hubness.milvus.client.messages import Question
from milvus_hubness.milvus.client.query_samples import Sampler, Target
from milvus_hubness.milvus.client.state_cache import CachedState, StateCache
from milvus_hubness.milvus.client.steps import Operation
from milvus_hubness.milvus.client.trials import NUMBER_BITS, Trial


class Recorder:
    """Records what searches were sent, what they answered, and what came of it.

    sampler: None records nothing.
    """

    def __init__(self, states: StateCache, sampler: Sampler | None) -> None:
        self._states = states
        self._sampler = sampler

    def sample(
        self, cached: CachedState, state: CollectionState, profile: str | None, data: Any
    ) -> None:
        """Offer the queries of an answered corrected search to the sampler."""
        if cached.is_sampled and self._sampler is not None:
            target = cached.sampling_of(state.field, profile or state.active)
            if target is not None:
                sampling, samples = target.sampling, target.samples
                self._sampler.offer(sampling, samples, state.dim, state.dtype, data)

    def sample_uncorrected(self, cached: CachedState, field: str | None, data: Any) -> None:
        """Offer the queries of an answered search that nothing corrects to the sampler.

        field: the searched one; None for the only one that the collection has.
        """
        if cached.is_sampled and self._sampler is not None:
            target = cached.sampled_field(field)
            if target is not None and isinstance(sampling := target.sampling, FieldSampling):
                queries = without_tensors(data)
                self._sampler.offer(sampling, target.samples, sampling.dim, sampling.dtype, queries)

    def record(
        self,
        cached: CachedState,
        state: CollectionState,
        question: Question,
        results: Any,
        offset: int,
    ) -> None:
        """Say the arm of a corrected answer, and record it if its outcomes are wanted."""
        if question.trial is None and not cached.has_outcomes:
            return
        target = cached.sampling_of(state.field, question.profile or state.active)
        self._record(cached, target, state.dim, state.dtype, question, results, offset)

    def record_uncorrected(
        self, cached: CachedState, field: str | None, question: Question, results: Any, offset: int
    ) -> None:
        """Record an answer that nothing corrects, if its outcomes are wanted.

        An experiment has no arms there: both would be the same.
        """
        target = cached.sampled_field(field) if cached.has_outcomes else None
        if target is not None and isinstance(sampling := target.sampling, FieldSampling):
            plain = replace(question, trial=None)
            self._record(cached, target, sampling.dim, sampling.dtype, plain, results, offset)

    def _record(
        self,
        cached: CachedState,
        target: Target | None,
        dim: int,
        dtype: Dtype,
        question: Question,
        results: Any,
        offset: int,
    ) -> None:
        try:
            trial = question.trial
            if target is not None and not self._is_recorded(target.sampling, trial):
                target = None
            if trial is None and target is None:
                return

            answered = Answered(
                trial=trial,
                # Half of the numbers: those that follow, for further queries, are numbers too.
                number=random.getrandbits(NUMBER_BITS - 1),
                queries=copied(question.data) if target else (),
                offset=offset,
                target=target,
                dim=dim,
                dtype=dtype,
            )
            # Rows that the client has ranked again may be a plain list, which takes no attribute.
            with suppress(AttributeError):
                results.hubness = answered
            if target is not None and self._sampler is not None:
                self._record_answers(self._sampler, answered, target, results)
        except Exception as error:
            # The search was answered: no fault of a record may fail it.
            log.warning("an answer of %r was not recorded: %s", cached.collection_id.name, error)

    def _is_recorded(self, sampling: Sampling, trial: Trial | None) -> bool:
        """Whether an answer is among those whose outcomes are recorded."""
        if self._sampler is None or not sampling.outcomes:
            return False
        # All answers to one query of an experiment are recorded or none is, in every client.
        return trial.is_recorded if trial else random.random() < sampling.outcomes

    def _record_answers(
        self, sampler: Sampler, answered: Answered, target: Target, results: Any
    ) -> None:
        milliseconds = 0.0
        if answered.trial is not None:
            milliseconds = 1_000 * (time.perf_counter() - answered.trial.began)
        at = int(time.time())
        for query, hits in enumerate(results):
            keys = keys_of_hits(hits, MOST_KEYS)
            make = partial(answer_of, answered, query, keys, milliseconds, at)
            sampler.put(target.samples, make)

    def feedback(self, answer: Any, key: Any, kind: str, query: int) -> Operation[bool]:
        """Record an outcome of an answer; see HubnessClient.feedback."""
        yield from ()  # an operation without a step: nothing is read for it
        expect_kind(kind)
        answered = getattr(answer, "hubness", None)
        if not isinstance(answered, Answered) or answered.target is None:
            return False
        keys = keys_of_hits(answer[query])
        if key not in keys:
            raise InvalidInput(f"the answer has no hit with the key {key!r}: pass that of a hit")
        rank = 1 + answered.offset + keys.index(key)
        number = answered.number + query
        return self._put_outcome(answered.target, answered.dim, number, key, kind, rank)

    def feedback_by_token(
        self, collection: str, token: str, key: Any, kind: str
    ) -> Operation[bool]:
        """Record an outcome of an answer that a token stands for."""
        expect_kind(kind)
        meant = Token.parse(token)
        cached = yield from self._states.cached_state(collection)
        target = cached.sampling_of(meant.field, meant.profile)
        if target is None or not target.sampling.outcomes:
            return False
        sampling = target.sampling
        if isinstance(sampling, FieldSampling):
            dim = sampling.dim
        elif state := cached.states.get(meant.field):
            dim = state.dim
        else:
            return False
        return self._put_outcome(target, dim, meant.number, key, kind, 0)

    def _put_outcome(
        self, target: Target, dim: int, number: int, key: Any, kind: str, rank: int
    ) -> bool:
        if self._sampler is None:
            return False
        make = partial(outcome_of, target.sampling, dim, number, key, kind, rank, int(time.time()))
        return self._sampler.put(target.samples, make)


def keys_of_hits(hits: Any, most: int | None = None) -> list[Any]:
    """Return the keys of the first hits of a query, in their order.

    hits: as pymilvus returns them, or a tuple of their keys.
    """
    if type(hits) is tuple:
        return list(hits[:most])
    keys = getattr(hits, "ids", None)
    # What was ranked again may have other hits than the server sent.
    if keys is not None and len(keys) == len(hits):
        return list(keys[:most])
    return [hit.id for hit in hits[:most]]
