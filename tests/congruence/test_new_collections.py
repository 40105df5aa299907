"""Collections that are corrected from their first row on."""

import numpy as np
import pytest
import torch
from pymilvus import DataType, MilvusClient
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    CSLS,
    NNN,
    BankTooSmall,
    Beside,
    Blend,
    CorrectionConfig,
    DimensionMismatch,
    DualInvertedSoftmax,
    InvalidInput,
    InvalidParameter,
    InvertedSoftmax,
    QueryBank,
    Recipe,
    diagnose,
    plan_correction,
    refresh,
    status,
    tune,
)
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.layout import Layout
from tests.support.galleries import METRICS, as_distance, nnn, plain_collection, similarity, vectors

ON_SERVERS = {"metric": ["COSINE"]}

DIM, ITEMS, K = 10, 90, 4


@pytest.fixture
def rng():
    return np.random.default_rng(41)


def assert_ranked(client, name, items, biases, metric, queries, **options):
    found = client.search(name, data=list(queries), limit=6, **options)
    for hits, raw in zip(found, similarity(queries, items, metric), strict=True):
        scores = raw - biases
        order = np.argsort(-scores)[:6]
        assert [hit["id"] for hit in hits] == order.tolist()
        np.testing.assert_allclose(hits.distances, as_distance(scores[order], metric), atol=3e-5)


@pytest.mark.parametrize("metric", METRICS)
def test_the_quick_form(backend, rng, metric):
    name, items, bank = backend.name("born"), vectors(rng, ITEMS, DIM), vectors(rng, 30, DIM)
    queries = vectors(rng, 5, DIM)
    client, plain = backend.hubness_client(), backend.client()
    client.create_collection(
        name,
        dimension=DIM,
        metric_type=metric,
        consistency_level="Strong",
        hubness=CorrectionConfig(Recipe(QueryBank(bank), estimator=NNN(K))),
    )
    client.insert(name, [{"id": i, "vector": row, "note": f"n{i}"} for i, row in enumerate(items)])
    assert_ranked(client, name, items, nnn(bank, items, metric, K, 0.75), metric, queries)
    told = status(backend.store(), name)
    assert (told.corrected, told.pending, told.metric, told.rows) == (True, 0, metric, ITEMS)
    described = client.describe_collection(name)
    assert [each["name"] for each in described["fields"]] == ["id", "vector"]
    assert described["enable_dynamic_field"]
    assert client.describe_index(name, "vector")["metric_type"] == metric
    assert plain.describe_index(name, "vector")["metric_type"] == "IP"
    refresh(backend.store(), name, Recipe(estimator=Blend()), rename=True)
    settled = backend.store().info(name).state.profile
    assert settled.estimator["name"] == "Blend"
    assert client.query(name, filter="id == 3", output_fields=["note"])[0]["note"] == "n3"


def test_under_l2_lengths_are_expected_to_be_those_of_the_bank(lite, rng):
    name, bank, targets = lite.name("born"), 3 * vectors(rng, 30, DIM), vectors(rng, 30, DIM)
    client, plain = lite.hubness_client(), Layout(DIM, "L2")
    for hubness, known in (
        (CorrectionConfig(Recipe(QueryBank(bank), estimator=NNN(K))), bank),
        (
            CorrectionConfig(
                Recipe(QueryBank(bank), estimator=NNN(K), target_bank=QueryBank(targets))
            ),
            targets,
        ),
    ):
        client.create_collection(name, dimension=DIM, metric_type="L2", hubness=hubness)
        assert lite.store().info(name).state.layout == measured_on(plain, known)
        client.drop_collection(name)


def test_the_schema_form_with_two_fields(lite, rng):
    name = lite.name("born")
    lite.made.append(f"{name}__bank_image")
    items = {"text": vectors(rng, ITEMS, DIM), "image": vectors(rng, ITEMS, 6)}
    banks = {"text": vectors(rng, 30, DIM), "image": vectors(rng, 20, 6)}
    client = lite.hubness_client()
    schema = client.create_schema()
    schema.add_field("pk", DataType.VARCHAR, max_length=20, is_primary=True)
    schema.add_field("text", DataType.FLOAT_VECTOR, dim=DIM)
    schema.add_field("image", DataType.FLOAT_VECTOR, dim=6)
    index = client.prepare_index_params("text", index_type="FLAT", metric_type="COSINE")
    index.add_index("image", index_type="HNSW", metric_type="L2", M=8, efConstruction=60)
    client.create_collection(
        name,
        schema=schema,
        index_params=index,
        consistency_level="Strong",
        properties={"team.owner": "search"},
        hubness=[
            CorrectionConfig(
                Recipe(QueryBank(banks["text"]), estimator=CSLS(K)), anns_field="text"
            ),
            CorrectionConfig(
                Recipe(QueryBank(banks["image"]), estimator=NNN(K)), anns_field="image"
            ),
        ],
    )
    client.insert(
        name,
        [
            {"pk": f"{i:03d}", "text": items["text"][i], "image": items["image"][i]}
            for i in range(ITEMS)
        ],
    )
    for field, metric, share in (("text", "COSINE", 0.5), ("image", "L2", 0.75)):
        queries = vectors(rng, 4, items[field].shape[1])
        biases = nnn(banks[field], items[field], metric, K, share)
        found = client.search(name, data=list(queries), anns_field=field, limit=5)
        for hits, raw in zip(found, similarity(queries, items[field], metric), strict=True):
            assert [hit["pk"] for hit in hits] == [
                f"{i:03d}" for i in np.argsort(-(raw - biases))[:5]
            ]
    assert lite.store().info(name).states["image"].slots == 1
    described = client.describe_collection(name)
    assert described["properties"]["team.owner"] == "search"
    assert [each["name"] for each in described["fields"]] == ["pk", "text", "image"]


def test_an_index_is_built_anew_for_the_metric_that_serves(lite, rng):
    name, items, bank = lite.name("born"), vectors(rng, ITEMS, DIM), vectors(rng, 30, DIM)
    client, plain = lite.hubness_client(), lite.client()
    client.create_collection(
        name,
        dimension=DIM,
        metric_type="COSINE",
        hubness=CorrectionConfig(Recipe(QueryBank(bank), estimator=NNN(K))),
    )
    client.insert(name, [{"id": i, "vector": row} for i, row in enumerate(items)])
    client.release_collection(name)
    client.drop_index(name, "vector")
    wrong = client.prepare_index_params("vector", index_type="FLAT", metric_type="L2")
    with pytest.raises(InvalidParameter, match=r"corrected for COSINE.*L2"):
        client.create_index(name, wrong)
    client.create_index(
        name, client.prepare_index_params("vector", index_type="FLAT", metric_type="COSINE")
    )
    client.load_collection(name)
    assert plain.describe_index(name, "vector")["metric_type"] == "IP"
    assert client.describe_index(name, "vector")["metric_type"] == "COSINE"
    assert_ranked(
        client, name, items, nnn(bank, items, "COSINE", K, 0.75), "COSINE", vectors(rng, 3, DIM),
        consistency_level="Strong",
    )  # fmt: skip


def test_without_hubness_it_is_pymilvus_own(lite):
    client, plain = lite.hubness_client(), lite.client()
    ours, theirs = lite.name("plain"), lite.name("plain")
    options = {
        "dimension": 5,
        "id_type": "string",
        "max_length": 30,
        "metric_type": "IP",
        "auto_id": False,
    }
    client.create_collection(ours, **options)
    plain.create_collection(theirs, **options)
    mine, other = plain.describe_collection(ours), plain.describe_collection(theirs)
    assert mine["fields"] == other["fields"]
    assert mine["properties"] == other["properties"]


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        (
            lambda bank: CorrectionConfig(Recipe(bank, estimator=Blend())),
            InvalidInput,
            "Blend is fitted on a gallery",
        ),
        (lambda bank: CorrectionConfig(Recipe(bank, estimator=NNN(99))), BankTooSmall, "99"),
        (
            lambda bank: CorrectionConfig(
                Recipe(QueryBank(np.ones((3, 4), np.float32)), estimator=NNN(2))
            ),
            DimensionMismatch,
            "4",
        ),
        (
            lambda bank: CorrectionConfig(Recipe(bank, estimator=DualInvertedSoftmax(0.1, 0.1))),
            InvalidInput,
            "target",
        ),
        (
            lambda bank: CorrectionConfig(Recipe(bank, estimator=InvertedSoftmax())),
            InvalidInput,
            "an estimator with an absolute tau",
        ),
        (lambda bank: CorrectionConfig(bank, anns_field="nothing"), InvalidInput, "vector"),
        (lambda bank: [CorrectionConfig(bank), CorrectionConfig(bank)], InvalidInput, "twice"),
        (lambda bank: bank, InvalidParameter, r"not QueryBank: pass CorrectionConfig\(bank\)"),
        (lambda bank: bank.vectors, InvalidParameter, "not ndarray"),
        (lambda bank: [Recipe(bank)], InvalidParameter, "not Recipe"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_left(lite, rng, how, error, said):
    client, name = lite.hubness_client(), lite.name("born")
    with pytest.raises(error, match=said):
        client.create_collection(name, dimension=DIM, hubness=how(QueryBank(vectors(rng, 30, DIM))))
    assert not client.has_collection(name)
    assert not client.has_collection(f"{name}__bank")


def test_a_refused_index_leaves_nothing(backend, rng):
    if backend.is_lite:
        pytest.skip("Milvus Lite takes an index of any name")
    client, name = backend.hubness_client(), backend.name("born")
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params("vector", index_type="NO_SUCH_INDEX", metric_type="IP")
    with pytest.raises(MilvusException, match="NO_SUCH_INDEX"):
        client.create_collection(
            name,
            schema=schema,
            index_params=index,
            hubness=CorrectionConfig(Recipe(QueryBank(vectors(rng, 30, DIM)), estimator=NNN(K))),
        )
    assert not client.has_collection(name)
    assert not client.has_collection(f"{name}__bank")


def test_a_refused_collection_leaves_no_bank(lite, rng):
    client, name = lite.hubness_client(), lite.name("born")
    client.create_collection(name, dimension=DIM)
    with pytest.raises(Exception, match=r"(?i)exist"):
        client.create_collection(
            name,
            dimension=DIM,
            hubness=CorrectionConfig(Recipe(QueryBank(vectors(rng, 30, DIM)), estimator=NNN(K))),
        )
    assert not client.has_collection(f"{name}__bank")
    assert not client.hubness_state(name)


def test_a_bank_that_another_job_drops_before_the_collection_names_it_is_there(
    lite, rng, monkeypatch
):
    create = MilvusClient.create_collection
    name = lite.name("born")

    def created(client, collection_name, *args, **options):
        if collection_name == name:
            rows = client.query(f"{name}__bank", filter="number >= 0", output_fields=["generation"])
            generation = rows[0]["generation"]
            lite.store()._delete_bank_rows(f"{name}__bank", generation)
        return create(client, collection_name, *args, **options)

    monkeypatch.setattr(MilvusClient, "create_collection", created)
    bank = QueryBank(vectors(rng, 30, DIM))
    config = CorrectionConfig(Recipe(bank, estimator=NNN(K)))
    lite.hubness_client().create_collection(name, dimension=DIM, hubness=config)
    state = lite.store().info(name).state
    assert len(lite.store().load_bank(state.profile.bank).queries) == 30


def test_a_bank_is_anything_like_an_array(lite, rng):
    client, name = lite.hubness_client(), lite.name("born")
    items, bank = vectors(rng, ITEMS, DIM), vectors(rng, 60, DIM)
    hubness = CorrectionConfig(Recipe(bank.tolist(), estimator=NNN(K), target_bank=bank[:5]))
    client.create_collection(name, dimension=DIM, metric_type="IP", hubness=hubness)
    client.insert(name, [{"id": i, "vector": row} for i, row in enumerate(items)])
    store = lite.store()
    [stored] = client.get(name, [0], ["hubness_bias"])
    assert stored["hubness_bias"] == pytest.approx(nnn(bank, items[:1], "IP", K, 0.75)[0], abs=1e-5)
    assert diagnose(store, name, bank.tolist(), bank).n_queries == 60
    assert refresh(store, name, bank).action == "none"
    assert (
        refresh(store, name, Recipe(bank[:30].tolist(), target_bank=bank), rename=True).action
        == "full"
    )
    assert tune(store, name, torch.from_numpy(bank)).bank_size == 60
    plain = lite.name("plain")
    plain_collection(lite.client(), plain, items, "IP")
    assert (
        len(plan_correction(store, plain, Recipe(bank.tolist(), target_bank=bank)).chosen.bank)
        == 60
    )
    assert (
        len(
            plan_correction(
                store, plain, Recipe(bank.tolist(), target_bank=bank), Beside()
            ).chosen.bank
        )
        == 60
    )
