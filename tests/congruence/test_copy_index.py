"""A copy whose index is another than its source's."""

from dataclasses import replace

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    Copy,
    InvalidParameter,
    MigrationOptions,
    MilvusStore,
    QueryBank,
    Recipe,
    ResumeRefused,
    StoreError,
    VerificationFailed,
    migrate,
    plan_correction,
    resume,
    rollback,
)
from milvus_hubness.jobs.migration.catch_up import verify
from milvus_hubness.jobs.migration.clean import clean, would_drop
from milvus_hubness.jobs.migration.run import cutover
from milvus_hubness.jobs.store.records import VectorField
from milvus_hubness.milvus.store import schema as milvus_schema
from milvus_hubness.milvus.store.server import validate_index
from tests.support.galleries import nnn, plain_collection, similarity, single_queries, vectors


def assert_index(backend, name, kind, **params):
    """As the database tells of it; Milvus Lite tells no parameters."""
    field = backend.store().info(name).vector_fields["vector"]
    assert field.index_type == kind
    if not backend.is_lite:
        assert {name: int(value) for name, value in field.index_params.items()} == params


def test_a_copy_has_the_index_that_it_is_to_have(backend):
    """Carried on with or begun at once; its columns are those that suit it."""

    class Breaking(MilvusStore):
        def upsert(self, collection, *args, **kwargs):
            if collection.endswith("_hubness"):
                raise StoreError("the connection broke")
            super().upsert(collection, *args, **kwargs)

    rng = np.random.default_rng(12)
    items, rows, query = (vectors(rng, count, 32) for count in (90, 200, 1))
    bank = single_queries(rows)
    client, name = backend.client(), backend.name()
    plain_collection(
        client, name, items, "COSINE", index_type="HNSW", params={"M": 8, "efConstruction": 40}
    )
    recipe = Recipe(bank, estimator=NNN(4))
    asked = {"index_type": "IVF_FLAT", "index_params": {"nlist": 12}}
    plan = plan_correction(backend.store(), name, recipe, Copy(measure=True, **asked))
    assert "the source's index is HNSW" in " ".join(plan.remarks)
    told = plan.to_dict()
    assert (told["index_type"], told["index_params"], told["recall"]["index_type"]) == (
        "IVF_FLAT", {"nlist": 12}, "IVF_FLAT"
    )  # fmt: skip
    with pytest.raises(StoreError):
        migrate(Breaking(client), plan, MigrationOptions(no_writers=True))
    with pytest.raises(ResumeRefused, match=r"index: .*IVF_FLAT.* then, None now"):
        migrate(
            backend.store(), plan_correction(backend.store(), name, Recipe(bank, estimator=NNN(4)))
        )
    done = resume(backend.store(), name, MigrationOptions(no_writers=True))
    assert_index(backend, done.target, "IVF_FLAT", nlist=12)
    assert backend.store().info(done.target).state.layout.locality_hint_count == 13
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
        plan = plan_correction(
            lite.store(), name, Recipe(bank, estimator=NNN(4)), Copy(index_params={"nlist": nlist})
        )
        return [each for each in plan.remarks if "advises" in each]

    [few] = said(20)
    assert "IVF_FLAT has nlist 20, Milvus advises 40" in few
    assert "--index-param nlist=40" in few
    assert said(21) == said(100) == []
    with pytest.raises(InvalidParameter, match="nlist of IVF_FLAT must be a whole number"):
        said("many")


def test_the_advice_is_for_a_segment():
    assert milvus_schema.advised_cells(100_000, 256) == 1_265
    assert milvus_schema.advised_cells(10**9, 256) == round(4 * (2**19) ** 0.5)


@pytest.mark.beyond_contract
def test_parameters_that_are_not_named_stay_those_of_the_source(backend):
    client, name = backend.client(), backend.name()
    rng = np.random.default_rng(12)
    items, bank = vectors(rng, 40, 8), QueryBank(vectors(rng, 20, 8))
    plain_collection(
        client, name, items, "IP", index_type="HNSW", params={"M": 8, "efConstruction": 40}
    )
    plan = plan_correction(
        backend.store(), name, Recipe(bank, estimator=NNN(4)), Copy(index_params={"M": 12})
    )
    migrate(backend.store(), plan, no_writers=True)
    assert_index(backend, name, "HNSW", M=8, efConstruction=40)
    assert_index(backend, plan.body.target, "HNSW", M=12, efConstruction=40)


WRONG_INDEXES = [
    (None, {"M": "abc"}, "M of HNSW must be a whole number from 2 to 2,048, not 'abc'"),
    (None, {"M": 1.5}, "M of HNSW must be a whole number from 2 to 2,048, not 1.5"),
    (None, {"M": True}, "M of HNSW must be"),
    (None, {"M": 2_049}, "M of HNSW must be"),
    (None, {"efConstruction": "abc"}, "efConstruction of HNSW must be a whole number from 1"),
    (None, {"m": 4}, "index type HNSW has no parameter 'm', it has: M, efConstruction"),
    (
        "IVF_FLAT",
        {"nlist": 65_537},
        "nlist of IVF_FLAT must be a whole number from 1 to 65,536, not 65537",
    ),
    ("IVF_FLAT", {"nlist": 0}, "nlist of IVF_FLAT"),
    ("FLAT", {"nlist": 5}, "index type FLAT has no parameter 'nlist', it has: none"),
    ("BOGUS", {}, "index type 'BOGUS' is unknown to this server .*: use one of AUTOINDEX, FLAT"),
    (
        "HNSW",
        {"mmap.enabled": "perhaps"},
        "mmap.enabled of HNSW must be one of TRUE, FALSE, not 'perhaps'",
    ),
]


def test_an_index_that_cannot_be_is_refused_before_anything_is_written(backend):
    client, name = backend.client(), backend.name()
    rng = np.random.default_rng(12)
    items, bank = vectors(rng, 40, 8), QueryBank(vectors(rng, 20, 8))
    plain_collection(
        client, name, items, "IP", index_type="HNSW", params={"M": 8, "efConstruction": 40}
    )
    store = backend.store()

    def refused(said, index_type, params):
        with pytest.raises(InvalidParameter, match=said):
            plan_correction(
                store,
                name,
                Recipe(bank, estimator=NNN(4)),
                Copy(index_type=index_type, index_params=params),
            )

    for index_type, params, said in WRONG_INDEXES:
        refused(said, index_type, params)
    refused("index type 'IVF_RABITQ' is unknown to this server", "IVF_RABITQ", {})
    if not backend.is_lite:
        refused(
            "index type IVF_FLAT needs nlist on this server .* give a whole number", "IVF_FLAT", {}
        )
    plan = plan_correction(
        store,
        name,
        Recipe(bank, estimator=NNN(4)),
        Copy(index_type="ivf_flat", index_params={"nlist": "9"}),
    )
    assert plan.to_dict()["index_type"] == "IVF_FLAT"
    bogus = {"index_type": "BOGUS", "index_params": {}}
    body = replace(plan.body, arguments={**plan.body.arguments, "index": bogus})
    wrong = replace(plan, body=body)
    with pytest.raises(InvalidParameter, match="'BOGUS'"):
        migrate(store, wrong, MigrationOptions(no_writers=True))
    assert not client.has_collection(plan.body.target)


def field(index_type, **params):
    return VectorField("vector", 8, "IP", index_type, params)


def test_what_the_index_of_the_source_has_is_valid_though_the_table_has_it_not():
    """A newer Milvus knows more than this version of ours; an older one takes M 1."""
    newer, older = field("NEWER", depth="3"), field("HNSW", M="1", efConstruction="8", odd="x")
    for server in ("v2.3.5-lite", "v2.6.18", "milvus_lite 3.2.2", "master-abc"):
        validate_index(newer, newer, server)
        validate_index(field("NEWER", depth=99), newer, server)
        validate_index(older, older, server)
        validate_index(field("HNSW", M="1", efConstruction=9, odd="x"), older, server)
        with pytest.raises(InvalidParameter, match="M of HNSW must be a whole number from 2"):
            validate_index(field("HNSW", M=0), older, server)
        with pytest.raises(InvalidParameter, match="'NEWER' is unknown to this server"):
            validate_index(newer, older, server)


@pytest.mark.parametrize(
    ("server", "kind", "params", "said"),
    [
        ("v2.3.5-lite", "HNSW_SQ", {"M": 8, "efConstruction": 8}, "is unknown to this server"),
        (
            "v2.5.0",
            "HNSW_SQ",
            {"M": 8, "sq_type": "bf16", "refine": True, "refine_type": "FP32"},
            None,
        ),
        ("v2.5.0", "HNSW_SQ", {"sq_type": "SQ9"}, "sq_type of HNSW_SQ must be one of SQ4U, SQ6"),
        ("v2.3.5-lite", "HNSW", {"M": 8}, "needs efConstruction on this server"),
        ("v2.4.0", "HNSW", {}, None),
        ("v2.6.18", "IVF_PQ", {"nlist": 8}, "index type IVF_PQ needs m on this server"),
        (
            "v2.6.18",
            "IVF_PQ",
            {"m": 8, "nbits": 25},
            "nbits of IVF_PQ must be a whole number from 1 to 24",
        ),
        ("v2.6.18", "GPU_CAGRA", {"graph_degree": 32, "build_algo": "NN_DESCENT"}, None),
        ("milvus_lite 3.2.2", "IVF_PQ", {"m": 8}, "is unknown to this server"),
        ("Zilliz Cloud", "IVF_RABITQ", {"nlist": 4}, None),
    ],
)
def test_what_each_version_of_milvus_builds(server, kind, params, said):
    if said is None:
        validate_index(field(kind, **params), field("FLAT"), server)
    else:
        with pytest.raises(InvalidParameter, match=said):
            validate_index(field(kind, **params), field("FLAT"), server)


class Trusting(MilvusStore):
    """Asks no table."""

    def validate_index(self, planned, source):
        pass


def test_a_copy_that_has_no_index_and_cannot_be_loaded_is_dropped(backend):
    client, name = backend.client(), backend.name()
    rng = np.random.default_rng(12)
    items, bank = vectors(rng, 40, 8), QueryBank(vectors(rng, 20, 8))
    plain_collection(client, name, items, "IP")
    store = Trusting(client)
    plan = plan_correction(store, name, Recipe(bank, estimator=NNN(4)), Copy(index_type="BOGUS"))
    if backend.is_lite:
        migrate(store, plan, MigrationOptions(no_writers=True))
        client.release_collection(plan.body.target)
    else:
        with pytest.raises(StoreError, match="BOGUS"):
            migrate(store, plan, MigrationOptions(no_writers=True))
    with pytest.raises((StoreError, VerificationFailed)):
        verify(store, name)
    going = would_drop(backend.store(), name, drop=plan.body.target)
    assert going["the copy"] == f"{plan.body.target}, rows not counted, as it cannot be read"
    clean(backend.store(), name, drop=plan.body.target)
    assert not {plan.body.target, plan.bank_collection} & set(client.list_collections())
    again = plan_correction(backend.store(), name, Recipe(bank, estimator=NNN(4)))
    assert migrate(backend.store(), again, no_writers=True).rows == 40


def test_the_copys_index_is_verified(backend):
    """Until the copy has taken over: then it is its owner's."""
    client, name = backend.client(), backend.name()
    rng = np.random.default_rng(12)
    items, bank = vectors(rng, 40, 8), QueryBank(vectors(rng, 20, 8))
    plain_collection(client, name, items, "IP")
    asked = {"index_type": "IVF_FLAT", "index_params": {"nlist": 8}}
    plan = plan_correction(backend.store(), name, Recipe(bank, estimator=NNN(4)), Copy(**asked))
    migrate(backend.store(), plan, MigrationOptions(no_writers=True))
    verify(backend.store(), name)
    client.release_collection(plan.body.target)
    client.drop_index(plan.body.target, "vector")
    with pytest.raises(
        VerificationFailed, match=r"has no index, planned was IVF_FLAT \{'nlist': 8\}"
    ):
        verify(backend.store(), name)
    index = client.prepare_index_params(
        "vector", index_type="IVF_FLAT", metric_type="IP", params={"nlist": 9}
    )
    client.create_index(plan.body.target, index)
    client.load_collection(plan.body.target)
    if not backend.is_lite:
        with pytest.raises(VerificationFailed, match=r"has IVF_FLAT {'nlist': '9'}, planned was"):
            verify(backend.store(), name)
    alias = f"{name}_alias"
    cutover(backend.store(), name, alias=alias, options=MigrationOptions(no_writers=True))
    assert verify(backend.store(), name).rows == 40
    rollback(backend.store(), name, options=MigrationOptions(no_writers=True))
    client.drop_alias(alias)
