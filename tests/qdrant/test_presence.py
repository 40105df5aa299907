"""The ledger is never believed without a look, and payloads with keys of hidden fields are seen by the plan."""

import numpy as np
import pytest
from qdrant_client import models

from milvus_hubness import (
    NNN,
    CannotMigrate,
    CollectionExists,
    CollectionNotFound,
    Copy,
    MigrationOptions,
    QueryBank,
    Recipe,
    clean,
    migrate,
    plan_correction,
    resume,
    rollback,
)
from tests.qdrant.worlds import key
from tests.support.galleries import vectors

ALONE = MigrationOptions(no_writers=True)


def small(backend, seed=5, count=60):
    rng = np.random.default_rng(seed)
    return backend.fill(vectors(rng, count, 8), "Dot"), QueryBank(vectors(rng, 40, 8))


def again(backend, name, count):
    """Drop a collection, and make another one of its name."""
    client = backend.client
    described = client.get_collection(name)
    client.delete_collection(name)
    client.create_collection(name, vectors_config=described.config.params.vectors)
    rows = vectors(np.random.default_rng(8), count, 8)
    client.upsert(
        name, [models.PointStruct(id=i + 1, vector=row.tolist()) for i, row in enumerate(rows)]
    )


def test_a_copy_that_was_dropped_is_not_verified(backend):
    name, bank = small(backend)
    store = backend.store()
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)))
    target = migrate(store, plan, ALONE).target
    backend.client.delete_collection(target)
    for step in (lambda: migrate(store, plan, ALONE), lambda: resume(store, name, ALONE)):
        with pytest.raises(CollectionNotFound, match=r"the copy .* is gone: .*--restart"):
            step()
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Copy(restart=True))
    assert migrate(store, plan, ALONE).verified["rows"] == 60


def test_a_new_source_is_not_the_old_one(backend):
    """A rollback would have made its points equal to those of the copy."""
    name, bank = small(backend)
    store = backend.store()
    backend.made.append("live")
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Copy(alias="live"))
    target = migrate(store, plan, ALONE).target
    again(backend, name, 20)
    for step in (
        lambda: resume(store, target, ALONE),
        lambda: rollback(store, "live", options=ALONE),
    ):
        with pytest.raises(
            CollectionExists, match=r"the source .* is gone, and another collection has its name"
        ):
            step()
    with pytest.raises(CollectionExists, match="nothing was dropped"):
        clean(store, target, drop=name)
    assert backend.client.count(name).count == 20


def test_payloads_with_keys_of_hidden_fields_are_refused(backend):
    name, bank = small(backend, count=700)
    backend.client.set_payload(name, {"hubness_epoch": 1}, [key(699)])
    store = backend.store()
    with pytest.raises(CannotMigrate, match=r"hubness_epoch \(1 row\)"):
        plan_correction(store, name, Recipe(bank, estimator=NNN(4)))
    backend.client.delete_payload(name, ["hubness_epoch"], [key(699)])
    assert plan_correction(store, name, Recipe(bank, estimator=NNN(4))).body.survey.rows == 700
