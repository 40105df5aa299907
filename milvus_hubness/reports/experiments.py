"""The report on an experiment on live traffic, from the answers that clients recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from milvus_hubness.errors import InvalidInput
from milvus_hubness.jobs.common.outcomes import RecordedAnswer, recorded_answers
from milvus_hubness.jobs.store.protocols import Store, expect_store
from milvus_hubness.quality.experiment import ExperimentReport, Trials, report

HUB_DEVIATIONS = 2.0
"""A hub is a row whose k-occurrence is above the mean by so many standard deviations (Radovanović et
al., 2010)."""


def experiment_names(store: Store, collection: str, **whose: Any) -> dict[str, int]:
    """Return the experiments of a collection, the latest first, with their recorded answers."""
    answers = recorded_answers(store, collection, **whose)
    names = Counter(_name(answer) for answer in reversed(answers) if _name(answer))
    return {str(name): count for name, count in names.items()}


def experiment_report(
    store: Store,
    collection: str,
    name: str | None = None,
    *,
    field: str | None = None,
    profile: str | None = None,
    kind: str = "click",
    alpha: float = 0.05,
) -> tuple[str, ExperimentReport]:
    """Return the name of an experiment and what its recorded answers show.

    name: None for the latest. kind: of the outcomes that count. alpha: probability that the interval
    ever misses the true difference, at whichever looks. Raises CollectionNotFound and InvalidInput.
    """
    expect_store(store)
    info = store.info(collection)
    answers = recorded_answers(store, info.name, field=field, profile=profile, kind=kind)
    names = list(dict.fromkeys(_name(answer) for answer in reversed(answers) if _name(answer)))
    if not names:
        raise InvalidInput(
            f"no answer of an experiment is recorded of {info.name!r}: record outcomes with "
            f"milvus-hubness bank sample {info.name} --outcomes 1, and search with "
            "HubnessClient(experiment=Experiment(NAME)) or proxy --experiment NAME"
        )
    if name is not None and name not in names:
        raise InvalidInput(
            f"{info.name!r} has no recorded answers of experiment {name!r}: choose one of "
            f"{', '.join(map(str, names))}"
        )

    chosen = name or str(names[0])
    trials = trials_of([each for each in answers if _name(each) == chosen], info.rows)
    return chosen, report(trials, alpha)


def trials_of(answers: Sequence[RecordedAnswer], rows: int) -> Trials:
    """Return the answers of one experiment as trials. rows: of the collection.

    Raises InvalidInput if the share of the arms changed on the way, since earlier answers have
    another probability then.
    """
    facts = [answer.facts for answer in answers]
    shares = {float(each["share"]) for each in facts}
    if len(shares) > 1:
        raise InvalidInput(
            f"the experiment ran with several shares ({', '.join(map(str, sorted(shares)))}): give "
            "each share a name of its own"
        )

    hubs = _hubs(answers, rows)
    hub_share = [
        np.mean([key in hubs for key in each["keys"]]) if each["keys"] else np.nan for each in facts
    ]
    return Trials(
        unit=np.array([each["unit"] for each in facts], np.int64),
        treated=np.array([each["treated"] for each in facts], np.bool_),
        at=np.array([answer.at for answer in answers], np.int64),
        milliseconds=np.array([each["milliseconds"] for each in facts], np.float64),
        rank=np.array([answer.best_rank for answer in answers], np.int64),
        hub_share=np.array(hub_share, np.float64),
        share=shares.pop(),
        query=np.array([each["query"] for each in facts], np.int64),
    )


def _hubs(answers: Sequence[RecordedAnswer], rows: int) -> set[Any]:
    """Return the keys of hubs: rows among the first hits of far more different queries than others.

    Counted in the control arm, whose ranking is not corrected.
    """
    first_hits = {
        answer.facts["query"]: answer.facts["keys"]
        for answer in answers
        if not answer.facts["treated"] and not answer.facts["offset"]
    }
    counts = Counter(key for keys in first_hits.values() for key in keys)
    rows = max(rows, len(counts), 1)
    mean = counts.total() / rows
    mean_square = sum(count**2 for count in counts.values()) / rows
    deviation = max(mean_square - mean**2, 0.0) ** 0.5
    return {key for key, count in counts.items() if count > mean + HUB_DEVIATIONS * deviation}


def _name(answer: RecordedAnswer) -> str | None:
    name: str | None = answer.facts.get("experiment")
    return name
