"""A copy whose index is another than its source's."""

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    InvalidParameter,
    MilvusStore,
    QueryBank,
    ResumeRefused,
    Steering,
    StoreError,
    migrate,
    plan_migration,
    resume,
)
from milvus_hubness.jobs import run
from milvus_hubness.stores import milvus_schema
from tests.galleries import nnn, plain_collection, similarity, vectors


def assert_index(backend, name, kind, **params):
    """As the database tells of it; Milvus Lite tells no parameters."""
    field = backend.store().info(name).vector_fields["vector"]
    assert field.index_type == kind
    if not backend.is_lite:
        assert {name: int(value) for name, value in field.index_params.items()} == params


def test_a_copy_has_the_index_that_it_is_to_have(backend):
    """Carried on with or begun at once; its columns are those that suit it."""

    class Breaking(MilvusStore):
        def write(self, collection, *args, **kwargs):
            if collection.endswith("_hubness"):
                raise StoreError("the connection broke")
            super().write(collection, *args, **kwargs)

    rng = np.random.default_rng(12)
    items, bank, query = vectors(rng, 90, 32), QueryBank(vectors(rng, 200, 32)), vectors(rng, 1, 32)
    client, name = backend.client(), backend.name()
    plain_collection(client, name, items, "COSINE", index_type="HNSW", params={"M": 8, "efConstruction": 40})
    asked = {"estimator": NNN(4), "index_type": "IVF_FLAT", "index_params": {"nlist": 12}}
    plan = plan_migration(backend.store(), name, bank, measure=True, **asked)
    assert "the source's index is HNSW" in " ".join(plan.remarks)
    told = plan.to_dict()
    assert (told["index_type"], told["index_params"], told["recall"]["index_type"]) == (
        "IVF_FLAT", {"nlist": 12}, "IVF_FLAT"
    )  # fmt: skip
    with pytest.raises(StoreError):
        run(Breaking(client), plan, Steering(frozen=True))
    with pytest.raises(ResumeRefused, match=r"index: .*IVF_FLAT.* then, None now"):
        plan_migration(backend.store(), name, bank, estimator=NNN(4))
    done = resume(backend.store(), name, Steering(frozen=True))
    assert_index(backend, done.target, "IVF_FLAT", nlist=12)
    assert backend.store().info(done.target).state.layout.cell_count == 13
    found = backend.hubness_client().search(
        done.target, data=list(query), limit=90, search_params={"params": {"nprobe": 128}}
    )
    wanted = similarity(query, items, "COSINE") - nnn(bank.vectors, items, "COSINE", 4, 0.75)
    assert found[0].ids == np.argsort(-wanted[0]).tolist()


def test_fewer_cells_than_milvus_advises_are_remarked_on(lite):
    rng = np.random.default_rng(12)
    items, bank = vectors(rng, 100, 8), QueryBank(vectors(rng, 20, 8))
    name = lite.name()
    plain_collection(lite.client(), name, items, "IP", index_type="IVF_FLAT")

    def said(nlist):
        plan = plan_migration(lite.store(), name, bank, estimator=NNN(4), index_params={"nlist": nlist})
        return [each for each in plan.remarks if "advises" in each]

    [few] = said(20)
    assert "IVF_FLAT has nlist 20, Milvus advises 40" in few
    assert "--index-param nlist=40" in few
    assert said(21) == said(100) == []
    with pytest.raises(InvalidParameter, match="nlist of IVF_FLAT must be a whole number, not 'many'"):
        said("many")


def test_the_advice_is_for_a_segment():
    assert milvus_schema.advised_cells(100_000, 256) == 1_265
    assert milvus_schema.advised_cells(10**9, 256) == round(4 * (2**19) ** 0.5)


@pytest.mark.long_on_servers
def test_parameters_that_are_not_named_stay_those_of_the_source(backend):
    client, name = backend.client(), backend.name()
    rng = np.random.default_rng(12)
    items, bank = vectors(rng, 40, 8), QueryBank(vectors(rng, 20, 8))
    plain_collection(client, name, items, "IP", index_type="HNSW", params={"M": 8, "efConstruction": 40})
    plan = plan_migration(backend.store(), name, bank, estimator=NNN(4), index_params={"M": 12})
    migrate(backend.store(), plan, frozen=True)
    assert_index(backend, name, "HNSW", M=8, efConstruction=40)
    assert_index(backend, plan.target, "HNSW", M=12, efConstruction=40)


def test_an_index_that_there_is_not_is_named_and_can_be_taken_back(backend):
    if backend.is_lite:
        pytest.skip("Milvus Lite takes any name")
    client, name = backend.client(), backend.name()
    rng = np.random.default_rng(12)
    items, bank = vectors(rng, 40, 8), QueryBank(vectors(rng, 20, 8))
    plain_collection(client, name, items, "IP")
    asked = {"estimator": NNN(4), "index_type": "HNSW_WRONG"}
    with pytest.raises(StoreError, match="HNSW_WRONG"):
        migrate(backend.store(), plan_migration(backend.store(), name, bank, **asked), frozen=True)
    again = plan_migration(backend.store(), name, bank, estimator=NNN(4), restart=True)
    assert migrate(backend.store(), again, frozen=True).rows == 40
