"""Collections whose index divides rows into cells, or links them: who writes a row fills its locality hint columns."""

import numpy as np
import pytest
from pymilvus import DataType

from milvus_hubness import (
    CSLS,
    NNN,
    Beside,
    CorrectionConfig,
    InvertedSoftmax,
    MilvusStore,
    QueryBank,
    Recipe,
    enable,
    plan_correction,
    refresh,
)
from milvus_hubness.jobs.common.corrections import load_correction
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.milvus.store import schema as milvus_schema
from tests.support.aliases import aliased
from tests.support.galleries import plain_collection, single_queries, vectors
from tests.support.index_hints import BANK, CELLS, DIM, ITEMS, Divided, K

GRAPH = {"M": 16, "efConstruction": 100}


@pytest.mark.parametrize(
    ("metric", "lite", "server"),
    [("COSINE", "IVF_FLAT", None), ("IP", "IVF_FLAT", "IVF_SQ8"), ("IP", "HNSW_SQ", "HNSW")],
)
def test_a_copy_has_them(backend, metric, lite, server):
    index_type = lite if backend.is_lite else server
    if index_type is None:
        pytest.skip("shown on Milvus Lite")
    params = {"nlist": CELLS} if index_type.startswith("IVF") else GRAPH
    here = Divided(backend, metric, index_type=index_type, params=params, is_migrated=True)
    assert here.state.layout.locality_hint_count == 13
    here.assert_filled(range(ITEMS), here.items)
    if "SQ" not in index_type:
        here.assert_found()
    [row] = here.client.get(here.name, ids=[7])
    np.testing.assert_allclose(row["vector"], here.items[7], rtol=2.4e-7)


def test_there_are_none_for_other_indexes_and_metrics(lite):
    store, bank = lite.store(), QueryBank(vectors(np.random.default_rng(5), BANK, DIM))
    for metric, index_type in (("L2", "IVF_FLAT"), ("COSINE", "FLAT")):
        name = lite.name()
        params = {"nlist": CELLS} if index_type == "IVF_FLAT" else {}
        index = {"index_type": index_type, "params": params}
        plain_collection(lite.client(), name, bank.vectors, metric, **index)
        plan = plan_correction(store, name, Recipe(bank, estimator=NNN(K)))
        assert plan.chosen.layout.locality_hint_count == 0


@pytest.mark.lite_only
def test_what_a_client_writes_has_them(backend):
    Divided(backend).assert_writes_are_filled()


@pytest.mark.lite_only
def test_rows_that_wait_for_their_bias_wait_for_them_too(backend):
    here = Divided(backend)
    keys = here.insert(bias="pending")
    assert not here.cells(keys).any()
    here.name = aliased(here.store, here.name)
    assert refresh(here.store, here.name, force=True).written == ITEMS + len(keys)
    here.assert_filled(keys, here.new)
    here.assert_found(items=np.vstack([here.items, here.new]))


def test_a_client_that_writes_without_end_does_not_hold_up_an_enabling_in_place(lite):
    rng = np.random.default_rng(6)
    items, bank = vectors(rng, 60, DIM), vectors(rng, BANK, DIM)
    store, name = lite.store(), lite.name("beside")
    plain_collection(lite.client(), name, items, "IP")
    writer = lite.hubness_client()

    class WrittenBefore(MilvusStore):
        """Every pass begins with the keys."""

        def scan_keys(self, *args, **options):
            writer.upsert(name, [{"id": 7, "vector": items[8], "group": 0}])
            return super().scan_keys(*args, **options)

    plan = plan_correction(store, name, Recipe(single_queries(bank), estimator=NNN(K)), Beside())
    lite.made += plan.body.sides
    assert enable(WrittenBefore(lite.client()), plan).rows == 60


@pytest.mark.lite_only
def test_another_bank_changes_them_where_rows_are_built_anew(backend):
    here = Divided(backend, alias=(alias := backend.name("live")))
    former_cells = here.cells(range(ITEMS))
    refresh(here.store, alias, single_queries(here.other), force=True)
    here.name = here.store.info(alias).name
    assert here.name.endswith("_r2")
    assert np.abs(here.cells(range(ITEMS)) - former_cells).max() > 0.01
    here.assert_filled(range(ITEMS), here.items)
    here.assert_found(bank=here.other)


@pytest.mark.lite_only
def test_a_copy_that_has_none_gets_them_where_rows_are_built_anew(backend, monkeypatch):
    """As an earlier version made it."""
    with monkeypatch.context() as earlier:
        earlier.setattr(milvus_schema, "takes_locality_hints", lambda field: False)
        here = Divided(
            backend, "IP", alias=(alias := backend.name("live")), index_type="HNSW", params=GRAPH
        )
    assert here.state.layout.locality_hint_count == 0
    refresh(here.store, alias, single_queries(here.other), force=True)
    here.name = here.store.info(alias).name
    assert here.state.layout.locality_hint_count == 13
    here.assert_filled(range(ITEMS), here.items)
    here.assert_filled(here.insert(), here.new)
    here.assert_found(bank=here.other, items=np.vstack([here.items, here.new]))


@pytest.mark.lite_only
def test_a_further_profile_takes_one_of_their_columns(backend):
    here = Divided(backend)
    here.name = aliased(here.store, here.name)
    here.insert()
    refresh(
        here.store,
        here.name,
        Recipe(single_queries(here.other), estimator=CSLS(K)),
        profile="image",
    )
    assert here.state.layout.locality_hint_count == 13
    here.assert_filled(range(ITEMS), here.items)
    items = np.vstack([here.items, here.new])
    here.assert_found(items=items)
    here.assert_found(items=items, bank=here.other, share=0.5, profile="image")
    here.client.delete(here.name, ids=list(range(ITEMS, ITEMS + 3)))
    here.assert_filled(here.insert(), here.new)
    here.assert_found(items=items, bank=here.other, share=0.5, profile="image")


@pytest.mark.lite_only
def test_a_collection_that_is_born_corrected_has_them(backend):
    rng = np.random.default_rng(3)
    bank, items = QueryBank(vectors(rng, BANK, DIM)), vectors(rng, 40, DIM)
    client, name = backend.hubness_client(), backend.name("born")
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params(
        "vector", index_type="IVF_FLAT", metric_type="COSINE", params={"nlist": CELLS}
    )
    hubness = CorrectionConfig(Recipe(bank, estimator=InvertedSoftmax(0.05)))
    client.create_collection(
        name, schema=schema, index_params=index, consistency_level="Strong", hubness=hubness
    )
    client.insert(name, [{"id": i, "vector": row} for i, row in enumerate(items)])
    store = backend.store()
    state = store.info(name).state
    found: Batch = store.get(name, list(range(40)), "vector")
    wanted = load_correction(store, state, state.profile).locality_hints(items)
    assert wanted.any(axis=1).all()
    np.testing.assert_allclose(found.vectors[np.argsort(found.keys)][:, -14:-1], wanted, atol=1e-5)
