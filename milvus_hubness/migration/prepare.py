"""The preparation of a migration: the fit, the bank, the state, and the chunks."""

from __future__ import annotations

import uuid

import numpy as np

from milvus_hubness.banks.generations import StoredBank
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.correction import Correction, initial_state
from milvus_hubness.migration.compare import Endpoint, Pair
from milvus_hubness.migration.ledger import Ledger, Migration
from milvus_hubness.migration.plan import MigrationPlan
from milvus_hubness.operations.engines import Engine, load_corrections
from milvus_hubness.operations.lease_records import now
from milvus_hubness.stores.protocols import Store


def begun(ledger: Ledger, plan: MigrationPlan) -> Migration:
    """Return the unfinished migration that the plan continues, or a new one. Raises ResumeRefused if the plan
    differs from the unfinished migration's arguments."""
    known = ledger.of_target(plan.target)
    if known is not None and known.phase not in {"preparing", "finished"}:
        known.expect(plan.arguments)
        return known
    moment = now()
    return Migration(
        id=known.id if known and known.phase == "preparing" else uuid.uuid4().hex,
        source=plan.source.name,
        target=plan.target,
        field=plan.field,
        bank_collection=plan.bank_collection,
        arguments=plan.arguments,
        source_identity=plan.source.identity,
        phase="preparing",
        begun_at=moment,
        changed_at=moment,
        made_bank=known.made_bank if known and known.phase == "preparing" else "nothing",
    )


def prepared(store: Store, ledger: Ledger, plan: MigrationPlan, migration: Migration) -> Migration:
    """Fit the estimator, save the bank, and record the state and the chunks. After an interruption this
    starts again from the beginning."""
    correction = _fit(store, plan)
    kept = StoredBank(plan.bank, correction.fitted.potentials, plan.target_bank)
    if not store.exists(plan.bank_collection):
        migration = ledger.write(migration, made_bank="collection")
    bank, made_bank = store.save_bank(plan.bank_collection, kept, plan.layout.metric)
    state = initial_state(
        correction.layout,
        correction.fitted.estimator,
        bank,
        field=plan.field,
        suffix=plan.suffix,
        dtype=plan.source.vector_fields[plan.field].dtype,
        source=plan.source.name,
        phase="copying",
        mean_bias=correction.mean_bias,
        strength=plan.strength,
        gate=plan.gate,
        gate_targets=plan.gate_targets,
    ).model_copy(update={"migration": migration.id})
    ledger.forget_chunks(migration)
    ledger.write_chunks(migration, plan.survey.chunks)
    return ledger.write(
        migration,
        phase="copying",
        state=state,
        made_bank=migration.made_bank if migration.made_bank == "collection" else made_bank,
        rows=plan.survey.rows,
        chunks=len(plan.survey.chunks),
    )


def forward(store: Store, migration: Migration, engine: Engine = "local") -> Pair:
    """Return the pair of the source and the copy, whose biases `engine` computes from the saved bank. Raises
    as `on_engine` does."""
    copy = _corrected(store, migration, engine)
    return Pair(store, _source(store, migration), copy, migration.corrected())


def backward(store: Store, migration: Migration) -> Pair:
    """Return the pair with the copy as the origin and the source as the copy."""
    return Pair(store, _corrected(store, migration), _source(store, migration), migration.corrected())


def _source(store: Store, migration: Migration) -> Endpoint:
    name, before = migration.source_now, migration.rebuilds
    if before is None:
        return Endpoint(name)
    return Endpoint(name, before, load_corrections(store, before, unchecked=before.profiles))


def _corrected(store: Store, migration: Migration, engine: Engine = "local") -> Endpoint:
    state = migration.corrected()
    return Endpoint(migration.target, state, load_corrections(store, state, engine))


def _fit(store: Store, plan: MigrationPlan) -> Correction:
    """Return the correction, fitted on the bank and, if the estimator needs it, on the whole gallery. The
    gallery also gives the mean bias and the layout's constants; if the estimator does not need it, rows
    spread evenly over the keys replace it."""
    gallery, of = _gallery(store, plan), (plan.source, plan.field)
    correction = Correction.fit(
        plan.layout.measured_on(
            gallery,
            plan.bank.vectors,
            graph_hint=store.takes_graph_hint(*of),
            locality_hints=store.takes_locality_hints(*of),
        ),
        plan.estimator,
        plan.bank,
        gallery=gallery if plan.estimator.needs_gallery else None,
        target_bank=plan.target_bank,
    )
    biases = correction.centred(gallery)[~plan.layout.invalid(gallery)]
    mean_bias = float(biases.mean(dtype=np.float64)) if len(biases) else 0.0
    return Correction(correction.layout, correction.fitted, mean_bias)


def _gallery(store: Store, plan: MigrationPlan) -> Floats:
    if plan.estimator.needs_gallery:
        return np.concatenate(
            [
                store.scan(
                    plan.source.name, plan.field, after=each.after, upto=each.upto, partition=each.partition
                ).vectors
                for each in plan.survey.chunks
            ]
        )
    size = store.chunk_rows(plan.source)
    return np.concatenate(
        [
            store.get(plan.source.name, keys[start : start + size], plan.field, partition=partition).vectors
            for partition, keys in plan.survey.sample.items()
            for start in range(0, len(keys), size)
        ]
    )
