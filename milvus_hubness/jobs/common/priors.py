"""The prior of a job: what the caller asks for, and what the rows of the collection say of it."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.correction.banks.stored import Key, forms_of
from milvus_hubness.correction.estimators import Estimator, WithDemand
from milvus_hubness.correction.items import ItemRows
from milvus_hubness.correction.prior import (
    LARGEST_WEIGHT,
    REMEDY,
    Clicks,
    Prior,
    Values,
    checked_clicks,
    digest_of,
    problem_of,
)
from milvus_hubness.errors import InvalidInput, InvalidParameter, name_some
from milvus_hubness.jobs.common.progress import key_chunks
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo, TuningRecord

PriorLike = str | Mapping[Key, float]
"""What callers pass as a prior: a field of the rows, clicks by key, or DEMAND."""

DEMAND = "bank"
"""What callers pass in place of a field for the demand that the bank itself shows."""

KEYS_NAMED = 3
"""Most keys that a message names."""


@dataclass(frozen=True)
class PriorRequest:
    """The prior that the caller of a job asks for."""

    prior: Prior | None = None
    """The source, not measured on any gallery yet; None if the caller names none."""
    clicks: Clicks = field(default_factory=dict)
    """Its clicks, if it is from clicks."""
    weight: float | None = None
    """λ in units of the spread of scores; None for that of tuning."""
    is_dropped: bool = False
    """Whether the caller wants no prior."""
    is_demand: bool = False
    """Whether it is the demand that the bank shows, which is part of the estimator."""

    @classmethod
    def of(
        cls, prior: PriorLike | None, weight: float | None = None, *, is_dropped: bool = False
    ) -> PriorRequest:
        """Return the request of a caller. Raises InvalidInput, InvalidParameter."""
        is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if weight is not None and not (is_number and 0 <= weight <= LARGEST_WEIGHT):
            raise InvalidParameter(
                f"prior_weight is a number from 0 to {LARGEST_WEIGHT:g}, in units of the spread of "
                f"scores, not {weight!r}"
            )
        if is_dropped and (prior is not None or weight is not None):
            raise InvalidParameter("no_prior drops the prior: leave out prior and prior_weight")

        if prior is None:
            return cls(weight=weight, is_dropped=is_dropped)
        if isinstance(prior, str):
            if prior == DEMAND:
                return cls(weight=weight, is_demand=True)
            if not prior:
                raise InvalidInput("the prior has no name: pass a field of the rows")
            return cls(Prior(source="field", field=prior), weight=weight)
        if isinstance(prior, Mapping):
            return cls(Prior(source="pairs"), checked_clicks(prior), weight)
        raise InvalidInput(
            f"a prior is the name of a field, or clicks by key, not {type(prior).__name__}"
        )

    def expect_source(self) -> None:
        """Raise InvalidParameter for a weight without a prior, where there is none yet."""
        if self.prior is None and self.weight is not None and not self.is_demand:
            raise InvalidParameter("prior_weight is the weight of a prior: pass prior too")


@dataclass(frozen=True)
class ChosenPrior:
    """The prior of new biases."""

    prior: Prior | None = None
    clicks: Clicks = field(default_factory=dict)
    """Its clicks, if it is from clicks."""

    @classmethod
    def of(cls, request: PriorRequest) -> ChosenPrior:
        """Return the prior that a caller names, without the weight of tuning."""
        return cls(request.prior, request.clicks)

    @property
    def arguments(self) -> dict[str, object] | None:
        """What a further run of a job must repeat; None without a prior."""
        if self.prior is None:
            return None
        keys = list(self.clicks)
        values = np.array([self.clicks[key] for key in keys], np.float64)
        return {
            "source": self.prior.source,
            "field": self.prior.field,
            "weight": self.prior.weight,
            "clicks": f"{digest_of(keys, values):016x}" if keys else "",
        }

    @property
    def facts(self) -> dict[str, object] | None:
        """What a plan says of it, as plain data; None without a prior."""
        return None if self.prior is None else self.prior.facts(len(self.clicks))

    def values_of(self, rows: ItemRows) -> Values:
        """Return the values of rows, (n,); zeros without a prior. Raises as Prior.values_of does."""
        if self.prior is None:
            return np.zeros(len(rows.keys))
        return self.prior.values_of(rows, self.clicks)

    def remark(self, verdict: TuningRecord | None) -> str:
        """Return what the user should know of it; empty if it has a weight. verdict: on the bank."""
        if self.prior is None or self.prior.weight:
            return ""
        tuned = verdict.prior if verdict is not None and verdict.labelled else None
        if tuned is not None and tuned.subject == self.prior.subject and not tuned.weight:
            return (
                f"the prior from {self.prior.words} changes nothing: of all weights, tune found 0 the best "
                "on the labelled pairs"
            )
        return (
            f"no weight for the prior from {self.prior.words}, which changes nothing so far: run "
            "tune with --prior and labelled pairs, or pass --prior-weight"
        )


NO_PRIOR = ChosenPrior()


def joined_with(estimator: Estimator, request: PriorRequest, chosen: ChosenPrior) -> Estimator:
    """Return the estimator that goes with a prior: with the demand of the bank if the caller names
    it, and without it if there is another prior, as popularity would count twice.
    """
    of_biases = estimator.of_biases
    if request.is_demand:
        weight = WithDemand.weight if request.weight is None else request.weight
        return WithDemand((of_biases,), weight=weight)

    has_other = chosen.prior is not None and chosen.prior.weight > 0
    return of_biases if request.is_dropped or has_other else estimator


def chosen_prior(
    request: PriorRequest,
    verdict: TuningRecord | None,
    former: ChosenPrior = NO_PRIOR,
    *,
    is_followed: bool = True,
) -> ChosenPrior:
    """Return the prior that new biases get, with its weight, before it is measured.

    verdict: on the bank. former: the prior in use, which stays if the caller names no other.
    is_followed: whether the caller leaves to the verdict what is not named.
    """
    if request.is_dropped or request.is_demand:
        return NO_PRIOR

    tuned = verdict.prior if verdict is not None else None
    chosen = former
    if request.prior is not None:
        chosen = ChosenPrior.of(request)
    elif former.prior is None and tuned is not None and is_followed and tuned.source == "field":
        chosen = ChosenPrior(tuned)
    if chosen.prior is None:
        return NO_PRIOR

    prior = chosen.prior
    # Its parameters are those that a refresh need not move far from.
    if former.prior is not None and former.prior.subject == prior.subject:
        prior = former.prior

    weight = request.weight
    if weight is None and tuned is not None and (is_followed or request.prior is not None):
        weight = tuned.weight if tuned.subject == prior.subject else None
    if weight is not None and weight != prior.weight:
        prior = prior.model_copy(update={"weight": float(weight), "factor": 0.0})
    return replace(chosen, prior=prior)


def on_gallery(
    store: Store,
    info: CollectionInfo,
    chosen: ChosenPrior,
    *,
    is_new: bool = True,
    progress: Progress = silent,
) -> ChosenPrior:
    """Return the prior with what the values of all rows say.

    is_new: refuse values that are all alike, of which a new prior learns nothing. Raises
    InvalidInput, which names rows, for a value that is no number from 0 up.
    """
    prior = chosen.prior
    if prior is None:
        return chosen

    refused: dict[str, list[Key]] = {}
    parts: list[Values] = [np.empty(0)]
    digest = 0
    for partition, keys in key_chunks(store, info, f"reading {prior.words}", progress):
        if prior.source == "pairs":
            # Keys of one collection have one type, so the first ones show it.
            if len(parts) == 1:
                chosen = replace(chosen, clicks=_as_the_keys(chosen.clicks, keys))
            wanted = [chosen.clicks.get(key, 0.0) for key in keys]
        else:
            by_key = store.values(info.name, prior.field, keys, partition=partition)
            keys = [key for key in keys if key in by_key]
            wanted = []
            for key in keys:
                value = by_key[key]
                if value is not None and (problem := problem_of(value)):
                    refused.setdefault(problem, []).append(key)
                    value = None
                wanted.append(float(value or 0))

        values = np.array(wanted, np.float64)
        parts.append(values)
        digest = (digest + digest_of(keys, values)) % 2**64

    for problem, keys_of_problem in refused.items():
        raise InvalidInput(
            f"field {prior.field!r} of {info.name!r} is {problem} in "
            f"{len(keys_of_problem):,} row{'s' * (len(keys_of_problem) > 1)}, such as "
            f"{name_some(keys_of_problem, KEYS_NAMED)}: {REMEDY}"
        )

    everything = np.concatenate(parts)
    if is_new:
        _expect_differences(info.name, prior, everything)
    # Without any click there is nothing that a refresh could make up for.
    return replace(chosen, prior=prior.of_gallery(everything, f"{digest:016x}" if digest else ""))


def _as_the_keys(clicks: Clicks, keys: Sequence[Key]) -> Clicks:
    """Return clicks by keys of the type of these keys of a collection.

    Files may have keys as texts where a collection has whole numbers.
    """
    types = {type(key) for key in keys}
    # In Qdrant, a collection may have keys of both types.
    if len(types) != 1:
        return clicks
    counts: dict[Key, float] = {}
    for key, count in clicks.items():
        actual = next((form for form in forms_of(key) if type(form) in types), key)
        counts[actual] = counts.get(actual, 0.0) + count
    return counts


def _expect_differences(collection: str, prior: Prior, values: Values) -> None:
    """Raise InvalidInput for values of a gallery that are all alike."""
    if len(values) and values.min() < values.max():
        return

    if prior.source == "pairs":
        problem = f"no key of the clicks is one of {collection!r}"
        if len(values) and values.max() > 0:
            problem = f"all rows of {collection!r} have equally many clicks"
    else:
        problem = f"field {prior.field!r} of {collection!r} is 0 or missing in all rows"
        if len(values) and values.max() > 0:
            problem = f"field {prior.field!r} of {collection!r} is the same in all rows"
    raise InvalidInput(f"{problem}: a prior needs rows of which some are wanted more than others")
