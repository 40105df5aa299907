"""Vectors that the server computes from texts: refused with the reason, and left alone beside corrected fields."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from pymilvus import AnnSearchRequest, DataType, Function, FunctionType, RRFRanker

from milvus_hubness import (
    NNN,
    Beside,
    CannotMigrate,
    CorrectionConfig,
    InvalidInput,
    QueryBank,
    Recipe,
    enable,
    migrate,
    plan_correction,
    refresh,
)
from milvus_hubness.milvus.store import schema as milvus_schema
from milvus_hubness.reports.collections import diagnose, tune
from tests.support.aliases import aliased
from tests.support.galleries import vectors

DIM = 8
REASON = r"field 'meaning' are computed on the server, by function 'embed' \(TEXTEMBEDDING\)"


def embedding(text):
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    vector = np.random.default_rng(seed).standard_normal(DIM)
    return vector / np.linalg.norm(vector)


class Embeddings(BaseHTTPRequestHandler):
    """OpenAI's API of embeddings, on this machine."""

    def do_POST(self):
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
        texts = [texts] if isinstance(texts, str) else texts
        data = [{"index": i, "embedding": embedding(text).tolist()} for i, text in enumerate(texts)]
        body = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def model():
    """The parameters of a function that asks this model."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Embeddings)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    yield {
        "provider": "openai",
        "model_name": "m",
        "dimensions": DIM,
        "api_key": "k",
        "base_url": url,
    }
    server.shutdown()
    server.server_close()


def schema_with(client, model, *, both):
    """A text and its computed vector and, with `both`, a vector that clients write."""
    schema = client.create_schema(enable_dynamic_field=True)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("text", DataType.VARCHAR, max_length=200)
    schema.add_field("meaning", DataType.FLOAT_VECTOR, dim=DIM)
    index = client.prepare_index_params("meaning", index_type="FLAT", metric_type="IP")
    if both:
        schema.add_field("picture", DataType.FLOAT_VECTOR, dim=DIM)
        index.add_index("picture", index_type="FLAT", metric_type="IP")
    schema.add_function(
        Function("embed", FunctionType.TEXTEMBEDDING, ["text"], ["meaning"], params=model)
    )
    return schema, index


def filled(backend, model, *, both=True, count=60):
    client, name = backend.client(), backend.name("texts")
    schema, index = schema_with(client, model, both=both)
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    pictures = vectors(np.random.default_rng(1), count, DIM)
    rows = [
        {"id": i, "text": f"text {i}", **({"picture": pictures[i]} if both else {})}
        for i in range(count)
    ]
    client.insert(name, rows)
    return client, name


BANK = QueryBank(vectors(np.random.default_rng(2), 40, DIM))

JOBS = {
    "migrate": lambda store, name: plan_correction(store, name, BANK, field="meaning"),
    "enable": lambda store, name: plan_correction(store, name, BANK, Beside(), field="meaning"),
    "tune": lambda store, name: tune(store, name, BANK, field="meaning"),
}


@pytest.fixture(scope="module")
def texts(shared_lite, model):
    return filled(shared_lite, model)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_jobs_refuse_a_field_that_the_server_computes_and_write_nothing(shared_lite, texts, job):
    client, name = texts
    store, before = shared_lite.store(), client.list_collections()
    with pytest.raises(CannotMigrate, match=REASON):
        job(store, name)
    assert client.list_collections() == before
    assert not client.describe_collection(name)["properties"].get("hubness_tuning")


def test_a_collection_with_no_other_vectors_is_refused_without_a_named_field(lite, model):
    _, name = filled(lite, model, both=False)
    with pytest.raises(CannotMigrate, match=REASON):
        plan_correction(lite.store(), name, BANK)
    with pytest.raises(CannotMigrate, match=REASON):
        plan_correction(lite.store(), name, BANK, Beside())


def test_a_diagnosis_still_shows_the_hubs_of_such_a_field(shared_lite, texts):
    found = diagnose(
        shared_lite.store(), texts[1], BANK, Recipe(BANK, estimator=NNN(8)), field="meaning"
    )
    assert found.title == texts[1]


def test_create_collection_refuses_to_correct_it(lite, model):
    client, name = lite.hubness_client(), lite.name("new")
    schema, index = schema_with(client, model, both=True)
    correction = CorrectionConfig(Recipe(BANK, estimator=NNN(8)), anns_field="meaning")
    with pytest.raises(InvalidInput, match=REASON):
        client.create_collection(name, schema=schema, index_params=index, hubness=correction)
    assert not client.has_collection(name)
    assert not client.has_collection(f"{name}__bank")


def found(results):
    return [[hit["id"] for hit in hits] for hits in results]


@pytest.mark.parametrize("how", ["migrate", "enable", "new"])
def test_texts_are_searched_as_before_beside_a_corrected_field(lite, model, how):
    plain, name = filled(lite, model)
    store, client = lite.store(), lite.hubness_client()
    asked = {"data": ["text 3", "text 5"], "anns_field": "meaning", "limit": 4}
    before = found(plain.search(name, **asked))
    assert [hits[0] for hits in before] == [3, 5]
    if how == "new":
        rows = plain.query(name, "id >= 0", output_fields=["id", "text", "picture"])
        target = lite.name("made")
        schema, index = schema_with(client, model, both=True)
        correction = CorrectionConfig(Recipe(BANK, estimator=NNN(8)), anns_field="picture")
        client.create_collection(
            target,
            schema=schema,
            index_params=index,
            hubness=correction,
            consistency_level="Strong",
        )
        client.insert(target, [dict(row) for row in rows])
    elif how == "migrate":
        target = migrate(
            store, plan_correction(store, name, Recipe(BANK, estimator=NNN(8)), field="picture")
        ).target
    else:
        plan = plan_correction(
            store, name, Recipe(BANK, estimator=NNN(8)), Beside(), field="picture"
        )
        enable(store, plan, client_ttl=0)
        target = name
    if how != "enable":
        target = aliased(store, target)
    assert found(client.search(target, **asked)) == before
    assert found(client.search(target, **asked, strength=0)) == before
    client.upsert(target, {"id": 99, "text": "new", "picture": [0.5] * DIM})
    refresh(store, target, vectors(np.random.default_rng(3), 30, DIM), force=True, client_ttl=0)
    assert found(client.search(target, data=["new"], anns_field="meaning", limit=1)) == [[99]]
    assert found(client.search(target, **asked)) == before

    query = vectors(np.random.default_rng(4), 1, DIM)
    requests = [
        AnnSearchRequest(["text 3"], "meaning", {}, 5),
        AnnSearchRequest(list(query), "picture", {}, 5),
    ]
    both = found(client.hybrid_search(target, requests, RRFRanker(), 8))
    [by_picture] = found(client.search(target, data=query, anns_field="picture", limit=5))
    assert set(both[0]) >= {3, by_picture[0]}


def described(*functions):
    fields = [
        {"name": "dense", "type": DataType.FLOAT_VECTOR, "params": {"dim": 4}},
        {"name": "sparse", "type": DataType.SPARSE_FLOAT_VECTOR, "params": {}},
        {"name": "hashes", "type": DataType.BINARY_VECTOR, "params": {"dim": 64}},
    ]
    return {"fields": fields, "functions": list(functions)}


def test_functions_that_compute_no_dense_vector_are_no_obstacle():
    schema = described(
        {"name": "words", "type": FunctionType.BM25, "output_field_names": ["sparse"]},
        {"name": "near", "type": FunctionType.MINHASH, "output_field_names": ["hashes"]},
        {"name": "rank", "type": FunctionType.RERANK, "output_field_names": []},
        {"name": "unnamed", "type": FunctionType.RERANK},
    )
    [dense] = milvus_schema.vector_fields(schema, []).values()
    assert dense.computed_by == ""
    assert milvus_schema.computed_by(schema).keys() == {"sparse", "hashes"}


def test_a_function_of_a_kind_that_is_not_known_yet_is_an_obstacle():
    schema = described({"name": "f", "type": 99, "output_field_names": ["dense"]})
    [dense] = milvus_schema.vector_fields(schema, []).values()
    assert "by function 'f' (of another type)" in dense.obstacles[0]
