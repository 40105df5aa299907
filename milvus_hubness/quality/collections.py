"""`diagnose` and `tune` for collections of a store, and the HTML page of a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from typing import Any

import numpy as np
from jinja2 import Template
from markupsafe import Markup

from milvus_hubness import charts
from milvus_hubness.banks.bank import BankLike, QueryBank, optional_bank
from milvus_hubness.banks.generations import Key
from milvus_hubness.charts import number, page_template
from milvus_hubness.correction import Correction, reduced_targets
from milvus_hubness.errors import InvalidInput
from milvus_hubness.estimators import Blend, Estimator, from_dict, to_dict
from milvus_hubness.job_properties import TuningRecord
from milvus_hubness.operations.progress import Progress, silent
from milvus_hubness.operations.reading import WHERE_FROM, read_gallery
from milvus_hubness.quality import report, tuning
from milvus_hubness.quality.report import Diagnosis, Region
from milvus_hubness.stores.protocols import Store

LONGEST = 160


@cache
def _template() -> Template:
    return page_template(__package__, "report.html", LONGEST, {"points": charts.points})


def render(diagnosis: Diagnosis) -> str:
    """Return the HTML page in UTF-8; write it with encoding="utf-8"."""
    regions = _regions(diagnosis)
    return _template().render(
        d=diagnosis,
        headline=_headline(diagnosis),
        tiles=_tiles(diagnosis),
        curves=_curves(diagnosis),
        regions=regions,
        unreached=sum(not region.reached for region, _ in regions),
        largest=max((max(hub.item.before, hub.item.after) for hub in diagnosis.hubs), default=1),
        histogram=charts.histogram,
        whisker=charts.whisker,
        bars=charts.bars,
        share=charts.share,
    )


def _headline(d: Diagnosis) -> dict[str, Any]:
    if d.verdict:
        verdict = d.verdict["verdict"]
        heading, tone = verdict.capitalize(), verdict.lower().replace(" ", "-")
        return {"tone": tone, "heading": heading, "reason": d.verdict["reason"], "interval": None}
    heading = f"Skewness {d.before.skewness:.2f} → {d.after.skewness:.2f}"
    reason = "Less hubness is not yet a better search: give right answers, or tune, for a verdict."
    if d.retrieval_before and d.retrieval_after:
        heading = f"R@1 {d.retrieval_before['R@1']:.1%} → {d.retrieval_after['R@1']:.1%}"
        reason = "Measured on these queries; nothing was held out to judge by."
    return {"tone": "", "heading": heading, "reason": reason, "interval": d.gain}


def _tiles(d: Diagnosis) -> list[tuple[str, ...]]:
    """Return name, value before, value after and meaning of each measure."""
    both, retrieval = (d.before, d.after), []
    if d.retrieval_before and d.retrieval_after:
        for measure, meaning in (("R@1", "a right answer first"), ("R@10", "one among the first ten")):
            pair = (d.retrieval_before[measure], d.retrieval_after[measure])
            retrieval.append((measure, *(f"{each:.1%}" for each in pair), meaning))
    return [
        *retrieval,
        ("Skewness", *(f"{each.skewness:.2f}" for each in both), f"of N_{d.k}; 0 is even"),
        ("Robin Hood", *(f"{each.robin_hood:.1%}" for each in both), "answers to move to be even"),
        ("Anti-hubs", *(f"{each.antihubs:.1%}" for each in both), "items never found"),
        ("Largest hub", *(number(each.largest) for each in both), f"queries with it in the top {d.k}"),
    ]


def _curves(d: Diagnosis) -> list[Markup]:
    strengths = [point.strength for point in d.strengths]
    recalls = [point.recall for point in d.strengths if point.recall]
    height = 160 if recalls else 230

    def curve(name: str, values: list[float], **style: Any) -> Markup:
        return charts.curve(name, strengths, values, d.strength, height, **style)

    return [
        *([curve("R@1", [each.estimate for each in recalls], percent=True, band=recalls)] if recalls else []),
        curve("Skewness", [point.hubness.skewness for point in d.strengths]),
        curve("Anti-hubs", [point.hubness.antihubs for point in d.strengths], percent=True),
    ]


def _regions(d: Diagnosis) -> list[tuple[Region, float]]:
    """Return the regions of the gallery, in order, with the share of each that the bank reaches."""
    regions = d.coverage.regions if d.coverage else []
    return sorted(((each, each.reached / each.items) for each in regions), key=lambda pair: pair[1])


def diagnose(
    store: Store,
    collection: str,
    queries: BankLike,
    *,
    bank: BankLike | None = None,
    target_bank: BankLike | None = None,
    estimator: Estimator | None = None,
    field: str | None = None,
    answers: Sequence[Key] | None = None,
    texts: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Diagnosis:
    """Search `queries` in the collection's rows before and after correction, and report the hubs.

    A corrected collection is shown with its current biases. Any other collection is shown with the biases
    that `estimator` computes from `bank`; by default that is the choice of tuning, else Blend. answers: the
    keys of the right rows. Raises InvalidInput, DimensionMismatch, CollectionNotFound, EmptyCollection.
    """
    queries, bank, target_bank = QueryBank.of(queries), optional_bank(bank), optional_bank(target_bank)
    info = store.info(collection)
    gallery = read_gallery(store, info, field, progress=progress)
    layout = gallery.layout
    queries.expect_dim(layout.dim, "the field")
    strength = 1.0
    state = info.state_of(field)
    if gallery.biases is not None and state is not None:
        bank = bank or store.load_bank(state.profile.bank).queries
        strength, biases = state.profile.strength, gallery.biases
    elif bank is None:
        raise InvalidInput(f"{info.name!r} is not corrected: pass --bank FILE ({WHERE_FROM})")
    else:
        tuned = info.tuning.choice if info.tuning else None
        estimator = estimator or (from_dict(tuned) if tuned else Blend())
        correction = Correction.fit(layout, estimator, bank, gallery=gallery.vectors, target_bank=target_bank)
        biases = correction.centred(gallery.vectors)
    return report.diagnose(
        layout.reduce_queries(queries.vectors),
        layout.reduce_items(gallery.vectors),
        biases - np.float32(biases.mean()),
        bank=QueryBank(layout.reduce_queries(bank.vectors), source=bank.source),
        positives=gallery.positions(answers) if answers is not None else None,
        keys=gallery.keys,
        fields=gallery.fields,
        query_texts=texts,
        strength=strength,
        verdict={"verdict": info.tuning.verdict, "reason": info.tuning.reason} if info.tuning else None,
        title=info.name,
    )


def tune(
    store: Store,
    collection: str,
    bank: BankLike | None = None,
    *,
    field: str | None = None,
    queries: BankLike | None = None,
    answers: Sequence[Key] | None = None,
    target_bank: BankLike | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> tuning.Tuning:
    """Try every method on the collection's rows, and write the result into a property of the collection.

    bank: by default the bank of the corrected collection. queries: (n, d); with answers, the keys of their
    right rows, they are labelled pairs; without answers they represent real queries. Raises InvalidInput,
    CollectionNotFound, EmptyCollection, and as `quality.tuning.tune` does.
    """
    bank, queries, target_bank = map(optional_bank, (bank, queries, target_bank))
    info = store.info(collection)
    if info.is_bank:
        raise InvalidInput(f"{info.name!r} is a query bank: tune the collection that it is for")
    state = info.state_of(field)
    if bank is None and state:
        stored = store.load_bank(state.profile.bank)
        bank, target_bank = stored.queries, target_bank or stored.targets
    if bank is None:
        raise InvalidInput(f"{info.name!r} is not corrected and has no bank: pass --bank FILE ({WHERE_FROM})")
    if answers is not None and (queries is None or len(answers) != len(queries)):
        raise InvalidInput(f"{len(answers)} answers for {len(queries) if queries else 0} queries")
    gallery = read_gallery(store, info, field, progress=progress)
    layout = gallery.layout
    for vectors in filter(None, (bank, target_bank, queries)):
        vectors.expect_dim(layout.dim, "the field")
    tuned = tuning.tune(
        QueryBank(layout.reduce_queries(bank.vectors), source=bank.source),
        layout.reduce_items(gallery.vectors),
        target_bank=reduced_targets(layout, target_bank) if target_bank else None,
        queries=layout.reduce_queries(queries.vectors) if queries else None,
        positives=gallery.positions(answers) if answers is not None else None,
        seed=seed,
        progress=progress,
    )
    record = TuningRecord(
        verdict=tuned.verdict,
        choice=to_dict(tuned.choice) if tuned.choice else None,
        strength=round(tuned.strength, 2),
        reason=tuned.reason,
        labelled=tuned.labelled,
        bank_fingerprint=bank.fingerprint,
        tuned_at=datetime.now(timezone.utc),
    )
    store.write_tuning(info.name, record)
    return tuned
