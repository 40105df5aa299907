"""The whole story on one retriever: load, search, migrate, search again, all through Milvus."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient

from milvus_hubness.banks import QueryBank
from milvus_hubness.client import HubnessClient
from milvus_hubness.demo.corpus import collect
from milvus_hubness.demo.towers import Retriever, build
from milvus_hubness.estimators import NNN
from milvus_hubness.jobs import migrate, plan_migration
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.progress import Progress, chunks, silent
from milvus_hubness.operations.lease import forget_leases
from milvus_hubness.operations.owner import LEDGER
from milvus_hubness.quality.hubness import k_occurrence, skewness
from milvus_hubness.quality.retrieval import recall_at_k
from milvus_hubness.stores import MilvusStore, connect

ESTIMATOR = NNN(k=16, alpha=0.75)
TOP = 10
BATCH = 500
STAGES = 3


@dataclass(frozen=True)
class Measured:
    """r1, r5, r10: Recall@k in percent. skewness: of N_10. seconds: for searching all queries."""

    r1: float
    r5: float
    r10: float
    skewness: float
    seconds: float


@dataclass(frozen=True)
class Example:
    """A question that was answered wrongly and is now answered rightly."""

    question: str
    before: str
    after: str


@dataclass(frozen=True)
class DemoResult:
    """collection, corrected_collection: what was made; gone again unless kept."""

    server: str
    queries: int
    gallery: int
    bank: int
    dim: int
    estimator: str
    raw: Measured
    corrected: Measured
    examples: list[Example]
    collection: str
    corrected_collection: str
    kept: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for people and for --json."""
        return asdict(self)


def run(
    uri: str, token: str = "", db_name: str = "", *, keep: bool = False, progress: Progress = silent
) -> DemoResult:
    """Build the retriever, put its gallery into the Milvus at `uri`, and measure before and after.

    keep: leave the collections there. Raises ServerUnavailable, StoreError, UnreadableFile.
    """
    began = time.perf_counter()
    connect(uri, token, db_name).close()
    stages = iter(range(STAGES))
    retriever = build(collect(), progress=lambda stage: progress(stage, 1 + next(stages), STAGES))
    plain = connect(uri, token, db_name)
    store = MilvusStore(plain)
    name = f"hubness_demo_{os.getpid():x}_{int(time.time()):x}"
    made, had_ledger = [name], store.exists(LEDGER)
    try:
        _load(plain, name, retriever, progress)
        before, raw = _measure(plain, name, retriever, "searching as it is", progress)
        plan = plan_migration(
            store, name, QueryBank(retriever.bank, source="Python standard library"), estimator=ESTIMATOR
        )
        migrate(store, plan, progress=progress, no_writers=True)
        made += [plan.target, plan.bank_collection]
        with_correction = HubnessClient(uri, token=token, db_name=db_name)
        after, corrected = _measure(with_correction, plan.target, retriever, "searching corrected", progress)
        with_correction.close()
    finally:
        for collection in [] if keep else made:
            if store.exists(collection):
                store.drop(collection)
        if not keep and store.exists(LEDGER):
            ledger, copy = Ledger(store), f"{name}_hubness"
            if migration := ledger.of_target(copy):
                ledger.forget(migration)
            forget_leases(store, name, copy)
            if not had_ledger:
                store.drop(LEDGER)
    return DemoResult(
        server=plain.get_server_version(),
        queries=len(retriever.queries),
        gallery=len(retriever.gallery),
        bank=len(retriever.bank),
        dim=retriever.gallery.shape[1],
        estimator=f"NNN(k={ESTIMATOR.k}, alpha={ESTIMATOR.alpha})",
        raw=raw,
        corrected=corrected,
        examples=_examples(retriever, before, after),
        collection=name,
        corrected_collection=plan.target,
        kept=keep,
        seconds=round(time.perf_counter() - began, 1),
    )


def _load(client: MilvusClient, name: str, retriever: Retriever, progress: Progress) -> None:
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=retriever.gallery.shape[1])
    schema.add_field("name", DataType.VARCHAR, max_length=512)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="COSINE")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    rows = [
        {"id": i, "vector": vector, "name": function}
        for i, (vector, function) in enumerate(zip(retriever.gallery, retriever.names, strict=True))
    ]
    for part in chunks(rows, BATCH, "loading the gallery", progress):
        client.insert(name, list(part))


def _measure(
    client: MilvusClient, collection: str, retriever: Retriever, doing: str, progress: Progress
) -> tuple[list[list[int]], Measured]:
    """The keys found for each query, best first, and what they are worth."""
    found: list[list[int]] = []
    seconds = 0.0
    for part in chunks(list(retriever.queries), BATCH, doing, progress):
        began = time.perf_counter()
        results = client.search(collection, data=list(part), limit=TOP, output_fields=["id"])
        seconds += time.perf_counter() - began
        found += [[hit["id"] for hit in hits] for hits in results]
    right = range(len(retriever.queries))
    r1, r5, r10 = (round(100 * recall_at_k(found, right, k), 2) for k in (1, 5, 10))
    skew = skewness(k_occurrence(found, len(retriever.gallery), TOP))
    return found, Measured(r1, r5, r10, round(float(skew), 2), round(seconds, 2))


def _examples(
    retriever: Retriever, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], limit: int = 5
) -> list[Example]:
    """Questions now answered rightly, those first that the worst hubs used to swallow."""
    swallowed = np.bincount([found[0] for found in before], minlength=len(retriever.names))
    repaired = [i for i in range(len(after)) if after[i][0] == i != before[i][0]]
    repaired.sort(key=lambda i: -swallowed[before[i][0]])
    shown: list[Example] = []
    for i in repaired:
        wrong = retriever.names[before[i][0]]
        if len(shown) < limit and wrong not in {example.before for example in shown}:
            question = retriever.docstrings[i].strip().splitlines()[0]
            shown.append(Example(question, wrong, retriever.names[i]))
    return shown
