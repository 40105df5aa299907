"""Vectors of structs, corrected: searches by MaxSim return the corrected scores, and all else is as before.

See test_structs.py for where this runs.
"""

import asyncio

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, DataType, MilvusClient, RRFRanker
from pymilvus.client.embedding_list import EmbeddingList
from pymilvus.client.prepare import Prepare
from pymilvus.client.types import PlaceholderType
from pymilvus.exceptions import MilvusException
from pymilvus.grpc_gen import common_pb2

from milvus_hubness import (
    NNN,
    CorrectionConfig,
    MilvusStore,
    QueryBank,
    migrate,
    plan_enable,
    plan_migration,
    refresh,
)
from milvus_hubness.correction.multi_vectors import MultiVectors
from milvus_hubness.correction.rerank import GloballyCorrected
from milvus_hubness.errors import CannotMigrate, InvalidInput
from milvus_hubness.jobs.refresh.sampling import start_sampling
from tests.milvus.proxy.running import ProxyHere
from tests.support.async_clients import opened

FIELD, DIM, ROWS, K = "chunks[embedding]", 12, 80, 8
METRICS = ["MAX_SIM_IP", "MAX_SIM_COSINE"]


def tokens(rng, count, are_units):
    """Vectors of which some lie near the common direction."""
    shared = np.random.default_rng(0).normal(size=DIM)
    rows = rng.normal(size=(count, DIM)) + np.outer(rng.gamma(1.0, 0.6, count), shared)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True) if are_units else np.sqrt(DIM)
    return (rows / lengths).astype(np.float32)


def max_sim(queries, documents):
    """(m, n) in float64, the mean over the vectors of a query."""
    return np.array(
        [
            [(q.astype(float) @ d.astype(float).T).max(axis=1).mean() for d in documents]
            for q in queries
        ]
    )


class Chunked:
    """A collection of documents of 0 to 6 chunks, and its corrected copy."""

    def __init__(self, place, metric):
        rng = np.random.default_rng(4)
        self.place, self.metric, self.rng = place, metric, rng
        self.are_units = metric == "MAX_SIM_COSINE"
        self.documents = {key: self.tokens(key % 7) for key in range(ROWS)}
        # Two alike, and one that a query of the bank has been made of.
        self.documents[8] = self.documents[1]
        self.bank = [self.tokens(1 + number % 5) for number in range(50)]
        self.other = [self.tokens(1 + number % 4) for number in range(60)]
        self.queries = [self.tokens(count) for count in (1, 3, 8)]
        self.client, self.source = place.client(), place.name("chunked")
        self.create(self.source)
        self.client.insert(self.source, [self.row(key) for key in self.documents])
        plan = plan_migration(
            place.store(), self.source, self.query_bank(self.bank), field=FIELD, estimator=NNN(K)
        )
        self.plan = plan
        self.copy = migrate(place.store(), plan).target
        self.corrected = place.hubness_client()

    def tokens(self, count):
        return tokens(self.rng, count, self.are_units)

    def create(self, name, *, nullable=False, **index):
        self.client.create_collection(
            name,
            schema=self.schema(nullable=nullable),
            index_params=self.indexes(**index),
            consistency_level="Strong",
        )

    @staticmethod
    def schema(*, nullable=False):
        schema = MilvusClient.create_schema(enable_dynamic_field=True)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=4)
        chunks = MilvusClient.create_struct_field_schema()
        chunks.add_field("text", DataType.VARCHAR, max_length=99)
        chunks.add_field("embedding", DataType.FLOAT_VECTOR, dim=DIM)
        chunks.add_field("page", DataType.INT64)
        struct = {"element_type": DataType.STRUCT, "struct_schema": chunks, "max_capacity": 9}
        schema.add_field("chunks", DataType.ARRAY, **struct, nullable=nullable)
        return schema

    def indexes(self, **options):
        params = MilvusClient.prepare_index_params("vector", index_type="FLAT", metric_type="L2")
        options = {"index_type": "HNSW", "metric_type": self.metric, "params": {"M": 8}, **options}
        params.add_index(FIELD, **options)
        return params

    def row(self, key, vectors=None):
        rows = self.documents[key] if vectors is None else vectors
        elements = [
            {"text": f"{key}.{i}", "embedding": token.tolist(), "page": 9 - i}
            for i, token in enumerate(rows)
        ]
        return {
            "id": key,
            "vector": [float(key), 1.0, 2.0, 3.0],
            "chunks": elements,
            "group": key % 3,
        }

    @staticmethod
    def query_bank(rows):
        return QueryBank(MultiVectors.from_list(rows), groups=np.arange(len(rows)))

    def wanted(self, query, bank, weight=1.0):
        """The scores of all documents that have vectors, by key, in float64."""
        keys = [key for key, rows in self.documents.items() if len(rows)]
        rows = [self.documents[key] for key in keys]
        top = np.sort(max_sim(bank, rows), axis=0)[-K:]
        biases = 0.75 * top.mean(axis=0)
        mean = self.place.store().info(self.copy).states[FIELD].profile.mean_bias
        raw = max_sim([query], rows)[0]
        return dict(zip(keys, len(query) * (raw - weight * (biases - mean)), strict=True))

    def search(self, query, client=None, name=None, **options):
        options = {"limit": 2 * ROWS, "anns_field": FIELD, **options}
        [hits] = (client or self.corrected).search(
            name or self.copy, data=[EmbeddingList(query)], **options
        )
        return {hit["id"]: hit["distance"] for hit in hits}

    def assert_scores(self, bank, weight=1.0, **options):
        for query in self.queries:
            assert self.search(query, **options) == pytest.approx(
                self.wanted(query, bank, weight), abs=5e-5
            )


@pytest.fixture(scope="module", params=METRICS)
def shared(place, request):
    return Chunked(place, request.param)


@pytest.fixture(params=METRICS)
def chunked(place, request):
    return Chunked(place, request.param)


def contents(client, name, output_fields=("id", "vector", "chunks", "group")):
    rows = client.query(name, "id >= 0", output_fields=list(output_fields))
    return {row["id"]: {field: row[field] for field in output_fields} for row in rows}


def test_searches_return_the_corrected_scores(shared):
    shared.assert_scores(shared.bank)


def test_strength_weighs_the_biases_of_each_query(shared):
    shared.assert_scores(shared.bank, 0.3, strength=0.3)
    query = shared.queries[1]
    raw = shared.search(query, shared.client, shared.source)
    assert shared.search(query, strength=0) == pytest.approx(raw, abs=2e-5)
    best, others = max(raw, key=raw.get), shared.search(query)
    assert raw[best] != pytest.approx(others[best], abs=1e-3)


def test_queries_of_one_request_have_answers_of_their_own(shared):
    data = [EmbeddingList(query) for query in shared.queries]
    answers = shared.corrected.search(shared.copy, data=data, anns_field=FIELD, limit=5)
    for hits, query in zip(answers, shared.queries, strict=True):
        wanted = shared.wanted(query, shared.bank)
        best = sorted(wanted.values(), reverse=True)[:5]
        assert [hit["distance"] for hit in hits] == pytest.approx(best, abs=5e-5)


def test_filters_offsets_rounding_and_metrics_are_as_before(shared):
    query = shared.queries[2]
    wanted = {k: v for k, v in shared.wanted(query, shared.bank).items() if k % 3 == 1}
    ranked = sorted(wanted, key=wanted.get, reverse=True)
    params = {"metric_type": shared.metric}
    hits = shared.search(
        query, filter="group == 1", limit=4, offset=2, search_params=params, round_decimal=2
    )
    assert list(hits) == ranked[2:6]
    assert list(hits.values()) == [round(score, 2) for score in hits.values()]
    with pytest.raises(MilvusException, match=f"expected {shared.metric}, not IP"):
        shared.search(query, search_params={"metric_type": "IP"})


def test_rows_are_read_as_they_were_written(shared):
    before = contents(shared.client, shared.source)
    assert len(before) == ROWS
    assert before[7]["chunks"] == []
    assert contents(shared.corrected, shared.copy) == before
    every = contents(shared.corrected, shared.copy, ("id", "chunks"))
    assert every == {key: {"id": key, "chunks": row["chunks"]} for key, row in before.items()}
    assert not any(
        name.startswith("hubness")
        for row in shared.corrected.query(shared.copy, "id == 5", output_fields=["*"])
        for name in row
    )


def test_hits_have_the_structs_that_were_written(shared):
    before = contents(shared.client, shared.source)
    data = [EmbeddingList(shared.queries[1])]
    [hits] = shared.corrected.search(
        shared.copy, data=data, anns_field=FIELD, limit=9, output_fields=["chunks", "group"]
    )
    assert len(hits) == 9
    for hit in hits:
        assert hit["entity"]["chunks"] == before[hit["id"]]["chunks"]
        assert set(hit["entity"]) == {"chunks", "group"}


def test_the_copy_stores_wider_vectors_and_shows_those_of_the_user(shared):
    def sub_field(client):
        fields = client.describe_collection(shared.copy)["fields"]
        [struct] = [field for field in fields if field["name"] == "chunks"]
        return {sub["name"]: sub for sub in struct["struct_fields"]}["embedding"]

    assert sub_field(shared.client)["params"]["dim"] == 16
    assert sub_field(shared.corrected)["params"]["dim"] == DIM
    assert shared.client.describe_index(shared.copy, FIELD)["metric_type"] == "MAX_SIM_IP"
    assert shared.corrected.describe_index(shared.copy, FIELD)["metric_type"] == shared.metric
    # One bias for all vectors of a row, none for a row without any.
    stored = contents(shared.client, shared.copy, ("id", "chunks", "hubness_bias"))
    for key, row in stored.items():
        behind = {element["embedding"][DIM] for element in row["chunks"]}
        assert len(behind) == (key % 7 > 0)
    assert len({row["hubness_bias"] for row in stored.values()}) > ROWS / 2


def test_other_vectors_of_the_row_are_searched_as_before(shared):
    query = [[3.0, 1, 2, 3]]
    options = {"data": query, "anns_field": "vector", "limit": 5}
    before = shared.client.search(shared.source, **options)
    after = shared.corrected.search(shared.copy, **options)
    assert [hit["id"] for hit in after[0]] == [hit["id"] for hit in before[0]]
    assert shared.corrected.search(shared.copy, data=query, limit=5, anns_field="vector")


@pytest.mark.parametrize("method", ["insert", "upsert"])
def test_rows_that_a_client_writes_are_corrected(chunked, method):
    for key, count in ((500, 3), (501, 0), (502, 1), (503, 9)):
        chunked.documents[key] = chunked.tokens(count)
    if method == "upsert":
        chunked.documents[2] = chunked.tokens(5)
        chunked.documents[4] = chunked.tokens(0)
    keys = [
        key for key in chunked.documents if key >= 500 or (method == "upsert" and key in (2, 4))
    ]
    rows = [chunked.row(key) for key in keys]
    given = [chunked.row(key) for key in keys]
    getattr(chunked.corrected, method)(chunked.copy, rows)
    assert rows == given
    chunked.assert_scores(chunked.bank)
    read = contents(chunked.corrected, chunked.copy)
    assert [read[row["id"]] for row in rows] == [
        {**row, "chunks": comparable(row["chunks"])} for row in rows
    ]


def comparable(elements):
    return [{**each, "embedding": np.float32(each["embedding"]).tolist()} for each in elements]


def test_pending_rows_get_the_mean_bias_until_a_refresh(chunked):
    chunked.documents[500] = chunked.tokens(3)
    chunked.corrected.insert(chunked.copy, [chunked.row(500)], bias="pending")
    query = chunked.queries[1]
    raw = len(query) * max_sim([query], [chunked.documents[500]])[0, 0]
    assert chunked.search(query)[500] == pytest.approx(raw, abs=5e-5)
    refresh(chunked.place.store(), chunked.copy, client_ttl=0)
    chunked.assert_scores(chunked.bank)


def test_a_refresh_by_another_bank_changes_the_biases_alone(chunked):
    before = contents(chunked.corrected, chunked.copy)
    store = chunked.place.store()
    done = refresh(
        store, chunked.copy, bank=chunked.query_bank(chunked.other), force=True, client_ttl=0
    )
    assert done.action == "full"
    chunked.assert_scores(chunked.other)
    assert contents(chunked.corrected, chunked.copy) == before


def test_hybrid_searches_send_corrected_queries_in_their_part(shared):
    sent = {}

    class Recording(MilvusClient):
        def search(self, collection_name, data, *args, **options):
            sent["alone"] = data
            return super().search(collection_name, data, *args, **options)

        def hybrid_search(self, collection_name, reqs, *args, **options):
            sent["together"], sent["other"] = (request.data for request in reqs)
            if shared.place.is_lite:
                # The model of a server has no hybrid search over structs.
                raise MilvusException(message="modelled no further")
            return super().hybrid_search(collection_name, reqs, *args, **options)

    client = shared.place.hubness_client(below=Recording)
    query = shared.queries[1]
    shared.search(query, client)
    requests = [
        AnnSearchRequest([EmbeddingList(query)], FIELD, {}, 20),
        AnnSearchRequest([[3.0, 1, 2, 3]], "vector", {}, 20),
    ]
    if shared.place.is_lite:
        with pytest.raises(MilvusException, match="modelled no further"):
            client.hybrid_search(shared.copy, requests, RRFRanker(), limit=5)
    else:
        [hits] = client.hybrid_search(shared.copy, requests, RRFRanker(), limit=5)
        assert len(hits) == 5
    assert sent["other"] == [[3.0, 1, 2, 3]]
    [alone], [together] = sent["alone"], sent["together"]
    np.testing.assert_array_equal([*together], [*alone])
    assert together.dim == 16


REFUSED = {
    "one vector": ({"data": [[0.0] * DIM]}, "as an EmbeddingList"),
    "re-ranker": ({"rerank": "adaptive"}, "rerank of field 'chunks.embedding.'"),
    "raw scores": ({"with_raw_score": True}, "with_raw_score of field 'chunks.embedding.'"),
    "NaN": ({"data": [EmbeddingList(np.full((2, DIM), np.nan, np.float32))]}, "NaN, infinity"),
    "no vectors": ({"data": [EmbeddingList()]}, "rows without a token"),
    "another dimension": ({"data": [EmbeddingList(np.ones((2, 3)))]}, f"{DIM}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_search_cannot_do_is_refused_in_one_line(shared, name):
    options, reason = REFUSED[name]
    options = {**options, **({"rerank": GloballyCorrected()} if "rerank" in options else {})}
    options = {"data": [EmbeddingList(shared.queries[0])], **options}
    with pytest.raises(MilvusException, match=reason) as refused:
        shared.corrected.search(shared.copy, anns_field=FIELD, limit=3, **options)
    assert "\n" not in refused.value.message


BAD_ROWS = {
    "NaN": (lambda row: row["chunks"][1]["embedding"].__setitem__(2, float("nan")), "NaN"),
    "another dimension": (lambda row: row["chunks"][1].update(embedding=[1.0]), "dimension|1 "),
    "no vector": (lambda row: row["chunks"][1].pop("embedding"), "list of dictionaries"),
    "no list": (lambda row: row.update(chunks=5), "list of dictionaries"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_cannot_be_corrected_are_refused_in_one_line(shared, name):
    spoil, reason = BAD_ROWS[name]
    row = shared.row(900, shared.tokens(3))
    spoil(row)
    with pytest.raises(MilvusException, match=reason) as refused:
        shared.corrected.insert(shared.copy, [shared.row(901, shared.tokens(2)), row])
    assert "\n" not in refused.value.message
    assert not shared.client.query(shared.copy, "id >= 900", output_fields=["id"])


def test_lengths_that_the_cosine_would_lose_are_refused(shared, place):
    vectors = 2 * shared.tokens(2)
    if shared.metric == "MAX_SIM_IP":
        assert shared.are_units is False
        return
    with pytest.raises(MilvusException, match="row 0 has a vector of length 2 in field"):
        shared.corrected.insert(shared.copy, [shared.row(900, vectors)])
    name = place.name("lengths")
    shared.create(name)
    shared.client.insert(name, [shared.row(5), shared.row(77, vectors)])
    with pytest.raises(CannotMigrate, match="row 77 has a vector of length 2 in field") as refused:
        plan_migration(place.store(), name, shared.query_bank(shared.bank), field=FIELD)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("metric", ["MAX_SIM_L2", "MAX_SIM_HAMMING", "MAX_SIM_JACCARD"])
def test_other_metrics_are_refused_with_the_reason(shared, place, metric):
    name = place.name("metrics")
    try:
        shared.create(name, metric_type=metric)
    except MilvusException:
        pytest.skip(f"this server has no {metric} of float vectors")
    shared.client.insert(name, [shared.row(key) for key in range(1, 20)])
    reason = (
        "adds up squared distances" if metric == "MAX_SIM_L2" else "are corrected for MAX_SIM_IP"
    )
    with pytest.raises(CannotMigrate, match=reason) as refused:
        plan_migration(place.store(), name, shared.query_bank(shared.bank), field=FIELD)
    assert metric in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("where", ["fields", "side_collection", "second_vector"])
def test_only_a_copy_can_hold_the_biases(shared, place, where):
    with pytest.raises(CannotMigrate, match=r"several vectors a row.*migrate") as refused:
        plan_enable(
            place.store(), shared.source, shared.query_bank(shared.bank), field=FIELD, where=where
        )
    assert "\n" not in str(refused.value)


def test_the_proxy_refuses_them_in_one_line(shared, place):
    query = {"data": [EmbeddingList(shared.queries[0])], "anns_field": FIELD, "limit": 3}
    with ProxyHere(place.uri.removeprefix("http://").split("/")[0]) as proxy:
        foreign = MilvusClient(proxy.uri, db_name=place.database, dedicated=True)
        calls = {
            "search": lambda: foreign.search(shared.copy, **query),
            "query": lambda: foreign.query(shared.copy, "id == 5", output_fields=["chunks"]),
            "upsert": lambda: foreign.upsert(shared.copy, [shared.row(5)]),
        }
        for call in calls.values():
            with pytest.raises(
                MilvusException, match=r"structs hold corrected.*HubnessClient"
            ) as no:
                call()
            assert "\n" not in no.value.message
        # The source is as it was.
        [hits] = foreign.search(shared.source, **query)
        assert len(hits) == 3
        foreign.close()


def test_asynchronous_clients_answer_alike(shared, place):
    query = shared.queries[1]

    async def answers():
        async with opened(place) as client:
            hits = await client.search(
                shared.copy, data=[EmbeddingList(query)], anns_field=FIELD, limit=2 * ROWS
            )
            rows = await client.query(shared.copy, "id == 5", output_fields=["chunks"])
            return {hit["id"]: hit["distance"] for hit in hits[0]}, rows[0]["chunks"]

    scores, chunks = asyncio.run(answers())
    assert scores == pytest.approx(shared.wanted(query, shared.bank), abs=5e-5)
    assert chunks == contents(shared.client, shared.source)[5]["chunks"]


def test_a_search_sends_each_vector_with_its_weight(shared):
    """The request as pymilvus encodes it: lists of embeddings, each with −w/c behind its numbers."""
    state = shared.place.store().info(shared.copy).states[FIELD]
    weights = []

    class Recording(MilvusClient):
        def search(self, collection_name, data, *args, **options):
            flat = [query.to_flat_array() for query in data]
            group = Prepare._prepare_placeholder_str(flat, is_embedding_list=True)
            [sent] = common_pb2.PlaceholderGroup.FromString(group).placeholders
            assert sent.type == PlaceholderType.EmbListFloatVector
            for value in sent.values:
                numbers = np.frombuffer(value, np.float32).reshape(-1, state.codec.form.width)
                weights.append(numbers)
            return super().search(collection_name, data, *args, **options)

    client = shared.place.hubness_client(below=Recording)
    query = shared.queries[1]
    shared.search(query, client, strength=0.5)
    [numbers] = weights
    np.testing.assert_allclose(numbers[:, :DIM], query, atol=1e-6)
    assert len(np.unique(numbers[:, DIM])) == 1
    assert numbers[0, DIM] < 0
    stored = shared.client.query(shared.copy, "id == 5", output_fields=["chunks", "hubness_bias"])
    [row] = stored
    behind = row["chunks"][0]["embedding"][DIM]
    assert behind * numbers[0, DIM] == pytest.approx(-0.5 * row["hubness_bias"], abs=1e-6)


def test_writes_during_a_refresh_are_corrected_by_the_new_bank(chunked):
    client = chunked.corrected
    chunked.documents[500] = chunked.tokens(3)
    chunked.documents[2] = chunked.tokens(4)
    del chunked.documents[9]
    pending = [lambda: client.insert(chunked.copy, [chunked.row(500)])]
    pending.append(lambda: client.upsert(chunked.copy, [chunked.row(2)]))
    pending.append(lambda: client.delete(chunked.copy, ids=[9]))

    class Interrupted(MilvusStore):
        """Clients write before and after its batches."""

        def upsert(self, collection, batch, field, **options):
            if pending and collection == chunked.copy:
                pending.pop()()
            super().upsert(collection, batch, field, **options)
            while pending and collection == chunked.copy:
                pending.pop()()

    bank = chunked.query_bank(chunked.other)
    store = Interrupted(chunked.place.client())
    refresh(store, chunked.copy, bank=bank, force=True, client_ttl=0)
    assert not pending
    chunked.assert_scores(chunked.other)
    assert contents(client, chunked.copy)[500]["chunks"] == comparable(chunked.row(500)["chunks"])


def test_writes_during_a_migration_reach_the_copy(chunked):
    chunked.documents[500] = chunked.tokens(3)
    chunked.documents[2] = chunked.tokens(0)
    pending = [lambda: chunked.corrected.upsert(chunked.source, [chunked.row(500), chunked.row(2)])]

    class Interrupted(MilvusStore):
        def scan(self, collection, field, **options):
            page = super().scan(collection, field, **options)
            while pending and chunked.client.has_collection(target) and page.keys:
                pending.pop()()
            return page

    target = chunked.place.name("second")
    plan = plan_migration(
        chunked.place.store(),
        chunked.source,
        chunked.query_bank(chunked.bank),
        field=FIELD,
        estimator=NNN(K),
        target=target,
    )
    chunked.copy = migrate(Interrupted(chunked.place.client()), plan).target
    assert not pending
    chunked.assert_scores(chunked.bank)
    assert contents(chunked.corrected, chunked.copy) == contents(chunked.client, chunked.source)


def test_a_rebuild_stores_the_new_biases_in_another_copy(chunked):
    alias = chunked.place.name("live")
    chunked.client.create_alias(chunked.copy, alias)
    before = contents(chunked.corrected, alias)
    bank = chunked.query_bank(chunked.other)
    store = chunked.place.store()
    done = refresh(store, alias, bank=bank, force=True, client_ttl=0, rebuild_rows=1)
    assert done.action == "rebuilt"
    chunked.copy = chunked.client.describe_collection(alias)["collection_name"]
    chunked.place.made.append(chunked.copy)
    chunked.assert_scores(chunked.other)
    assert contents(chunked.corrected, alias) == before


def test_rows_by_key_and_by_page_are_as_they_were_written(shared):
    before = contents(shared.client, shared.source)
    [row] = shared.corrected.get(shared.copy, ids=[5])
    assert row == before[5]
    pages = shared.corrected.query_iterator(
        shared.copy, batch_size=30, filter="id >= 0", output_fields=["id", "chunks"]
    )
    rows = {}
    while page := pages.next():
        rows |= {row["id"]: row["chunks"] for row in page}
    assert rows == {key: row["chunks"] for key, row in before.items()}


def test_a_partial_update_of_other_fields_leaves_the_vectors(chunked):
    try:
        chunked.corrected.upsert(chunked.copy, [{"id": 5, "group": 7}], partial_update=True)
    except MilvusException as error:
        pytest.skip(f"no partial updates: {error}")
    chunked.assert_scores(chunked.bank)
    wanted = {**contents(chunked.client, chunked.source)[5], "group": 7}
    assert contents(chunked.corrected, chunked.copy)[5] == wanted


def test_nullable_structs_are_refused_in_one_line(shared, place):
    name = place.name("nullable")
    shared.create(name, nullable=True)
    shared.client.insert(name, [shared.row(key) for key in range(1, 20)])
    with pytest.raises(CannotMigrate, match="is nullable") as refused:
        plan_migration(place.store(), name, shared.query_bank(shared.bank), field=FIELD)
    assert "\n" not in str(refused.value)


def test_import_files_hold_the_corrected_vectors(shared, tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    paths = shared.corrected.write_import_files(
        shared.copy, [shared.row(5), shared.row(7)], tmp_path
    )
    rows = [row for path in paths for row in parquet.read_table(path).to_pylist()]
    stored = contents(shared.client, shared.copy, ("id", "chunks", "hubness_bias"))
    for row in rows:
        vectors = [element["embedding"] for element in row["chunks"]]
        wanted = [element["embedding"] for element in stored[row["id"]]["chunks"]]
        np.testing.assert_allclose(vectors, wanted, atol=1e-5)
    assert [row["id"] for row in rows] == [5, 7]


def test_samples_of_their_queries_are_refused_in_one_line(shared, place):
    for name in (shared.source, shared.copy):
        with pytest.raises(InvalidInput, match="several vectors a row") as refused:
            start_sampling(place.store(), name, field=FIELD)
        assert "\n" not in str(refused.value)


def test_a_new_collection_cannot_have_them_corrected_yet(shared, place):
    config = CorrectionConfig(shared.query_bank(shared.bank), anns_field=FIELD)
    name = place.name("born")
    schema, params = shared.schema(), shared.indexes()
    with pytest.raises(MilvusException, match="in a copy only") as refused:
        shared.corrected.create_collection(name, schema=schema, index_params=params, hubness=config)
    assert "\n" not in refused.value.message
    assert name not in shared.client.list_collections()


def test_lengths_of_query_vectors_count_as_in_the_metric(shared):
    query = shared.queries[1]
    longer = query * np.array([[3.0], [0.5], [1.0]], np.float32)
    raw = shared.search(longer, shared.client, shared.source)
    assert shared.search(longer, strength=0) == pytest.approx(raw, abs=5e-5)
    if shared.are_units:
        assert shared.search(longer) == pytest.approx(shared.wanted(query, shared.bank), abs=5e-5)
