"""What is sent for fields of half precision as pymilvus packs it, and what comes back as it unpacks it."""

from datetime import datetime, timezone

import numpy as np
import pytest
import torch
from pymilvus import DataType
from pymilvus.client.entity_helper import extract_row_data_from_fields_data_v2
from pymilvus.client.prepare import Prepare
from pymilvus.client.search_result import SearchResult
from pymilvus.client.types import HybridExtraList, PlaceholderType
from pymilvus.grpc_gen import common_pb2, milvus_pb2, schema_pb2

from milvus_hubness.correction.codec.arrays import encode, rounded
from milvus_hubness.correction.codec.base import RowBiases, with_columns
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.overrides import Overrides
from milvus_hubness.correction.state import (
    BankReference,
    CandidateReranking,
    CollectionState,
    Profile,
)
from milvus_hubness.errors import DimensionMismatch, InvalidInput
from milvus_hubness.milvus.client.candidates import rewrite_of
from milvus_hubness.milvus.client.messages import Question
from milvus_hubness.milvus.client.rewrite import Reading
from milvus_hubness.milvus.client.searches import field_arguments
from milvus_hubness.milvus.client.writes import vectors_of
from milvus_hubness.milvus.store import schema as milvus_schema
from tests.support.galleries import METRICS, as_distance, similarity, vectors

ITEMS, QUERIES, DIM = 40, 3, 20
KINDS = {"float16": DataType.FLOAT16_VECTOR, "bfloat16": DataType.BFLOAT16_VECTOR}
PLACEHOLDERS = {
    "float16": PlaceholderType.FLOAT16_VECTOR,
    "bfloat16": PlaceholderType.BFLOAT16_VECTOR,
}


class Field:
    """A corrected field, its rows as pymilvus packs them, and answers as pymilvus unpacks them."""

    def __init__(self, dtype, metric, reranking=None):
        rng = np.random.default_rng(5)
        self.dtype, self.metric = dtype, metric
        self.items = rounded(vectors(rng, ITEMS, DIM), dtype)
        self.queries = rounded(vectors(rng, QUERIES, DIM), dtype)
        self.biases = rng.normal(0, 0.05, ITEMS).astype(np.float32)
        profile = Profile(
            estimator={"name": "NNN", "k": 4, "alpha": 0.75},
            slot=0,
            mean_bias=0.0,
            bank=BankReference(collection="b", generation="01", fingerprint="f", count=9, size=9),
            epoch=1,
            refreshed_at=datetime.now(timezone.utc),
            fitted_at=datetime.now(timezone.utc),
        )
        self.state = CollectionState(
            field="vector",
            layout=Layout(DIM, metric),
            dtype=dtype,
            source="c",
            phase="ready",
            profiles={"default": profile},
            reranking=reranking,
        )
        reading = Reading((self.state,))
        self.rewrite = rewrite_of(self.state, reading)
        self.schema = {
            "fields": [
                {"name": "id", "type": DataType.INT64, "params": {}, "is_primary": True},
                {
                    "name": "vector",
                    "type": KINDS[dtype],
                    "params": {"dim": self.state.codec.form.width},
                },
                {"name": "hubness_bias", "type": DataType.FLOAT, "params": {}},
                {"name": "hubness_epoch", "type": DataType.INT64, "params": {}},
                {"name": "hubness_norm", "type": DataType.DOUBLE, "params": {}},
            ],
            "properties": {"hubness": self.state.to_json()},
        }
        if not self.state.codec.decoding_fields:
            self.schema["fields"].pop()

    def packed(self, given):
        """The columns that are sent for rows whose vectors are given like this."""
        rows = [{"id": i, "vector": vector} for i, vector in enumerate(given)]
        found, codec = vectors_of(self.state, rows), self.state.codec
        columns = codec.encode_rows(found, RowBiases({0: self.biases}, 1))
        stored = with_columns(rows, codec.pack(columns))
        request = Prepare.row_upsert_param("c", stored, "", self.schema["fields"])
        return {column.field_name: column for column in request.fields_data}

    def numbers(self, packed, width):
        """By torch: the halves of these bytes."""
        bits = torch.frombuffer(bytearray(packed), dtype=getattr(torch, self.dtype))
        return bits.to(torch.float64).numpy().reshape(-1, width)

    def answered(self, asked, columns):
        """What a server that computes exactly answers, through pymilvus."""
        request = Prepare.search_requests_with_expr(
            collection_name="c",
            anns_field="vector",
            param=asked.search_params,
            limit=asked.limit,
            data=asked.data,
            schema=self.schema,
        )
        sent = common_pb2.PlaceholderGroup.FromString(request.placeholder_group).placeholders[0]
        assert sent.type == PLACEHOLDERS[self.dtype]
        width = self.state.codec.form.width
        packed = getattr(columns["vector"].vectors, f"{self.dtype}_vector")
        products = self.numbers(b"".join(sent.values), width) @ self.numbers(packed, width).T
        best = np.argsort(-products, axis=1)[:, : asked.limit]
        answer = schema_pb2.SearchResultData(
            num_queries=len(best),
            top_k=asked.limit,
            topks=[asked.limit] * len(best),
            primary_field_name="id",
        )
        answer.ids.int_id.data.extend(best.ravel().tolist())
        answer.scores.extend(np.take_along_axis(products, best, 1).ravel().tolist())
        for name, column in columns.items():
            answer.fields_data.append(self.picked(column, best.ravel().tolist()))
            answer.output_fields.append(name)
        return asked.answer(SearchResult(answer))

    def picked(self, column, places):
        """These rows of a column."""
        found = schema_pb2.FieldData(type=column.type, field_name=column.field_name)
        if column.field_name == "vector":
            packed, size = (
                getattr(column.vectors, f"{self.dtype}_vector"),
                2 * self.state.codec.form.width,
            )
            found.vectors.dim = self.state.codec.form.width
            parts = b"".join(packed[i * size : (i + 1) * size] for i in places)
            setattr(found.vectors, f"{self.dtype}_vector", parts)
            return found
        kind = column.scalars.WhichOneof("data")
        values = getattr(column.scalars, kind).data
        getattr(found.scalars, kind).data.extend([values[i] for i in places])
        return found


@pytest.fixture(params=METRICS)
def metric(request):
    return request.param


@pytest.fixture(params=KINDS)
def field(request, metric):
    return Field(request.param, metric)


def test_rows_are_packed_alike_however_they_are_given(field):
    columns = field.packed(encode(field.items, field.dtype))
    assert columns["vector"].vectors.dim == field.state.codec.form.width
    for given in (field.items, field.items.tolist(), field.items.astype(np.float64)):
        assert field.packed(given)["vector"] == columns["vector"]
    if field.dtype == "float16":
        assert field.packed(field.items.astype(np.float16))["vector"] == columns["vector"]
    stored = field.numbers(
        getattr(columns["vector"].vectors, f"{field.dtype}_vector"), field.state.codec.form.width
    )
    if field.metric != "COSINE":
        assert np.array_equal(stored[:, :DIM], field.items)


@pytest.mark.parametrize("strength", [1.0, 0.3, 0.0])
def test_answers_have_corrected_scores_and_the_vectors_that_were_given(field, strength):
    columns = field.packed(encode(field.items, field.dtype))
    raw = similarity(field.queries, field.items, field.metric)
    wanted = raw - strength * field.biases
    coarse = (
        {"float16": 1e-3, "bfloat16": 8e-3}
        if field.metric == "COSINE"
        else dict.fromkeys(KINDS, 1e-4)
    )
    for data in (encode(field.queries, field.dtype), field.queries, field.queries.tolist()):
        question = Question(
            data,
            10,
            output_fields=["vector"],
            overrides=Overrides(strength),
            with_raw_score=True,
            round_decimal=-1,
        )
        results = field.answered(field.rewrite.ask(question), columns)
        for number, hits in enumerate(results):
            keys = [hit["id"] for hit in hits]
            atol = coarse[field.dtype]
            np.testing.assert_allclose(
                hits.distances, as_distance(wanted[number, keys], field.metric), atol=atol
            )
            np.testing.assert_allclose(
                [hit["raw_score"] for hit in hits],
                as_distance(raw[number, keys], field.metric),
                atol=atol,
            )
            assert wanted[number, keys].min() >= np.sort(wanted[number])[-10] - 2 * atol
            for key, hit in zip(keys, hits, strict=True):
                assert set(hit["entity"]) == {"id", "vector"}
                revert = field.numbers(hit["entity"]["vector"], DIM)[0]
                step = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[field.dtype]
                exact = 0 if field.metric != "COSINE" else step
                np.testing.assert_allclose(revert, field.items[key], rtol=exact, atol=0)


def test_queried_rows_are_unpacked_and_given_back_as_pymilvus_gives_them(field):
    columns = field.packed(field.items)
    response = milvus_pb2.QueryResults(fields_data=list(columns.values()))
    rows = [dict.fromkeys(columns) for _ in range(ITEMS)]
    lazy = [
        each for each in response.fields_data if extract_row_data_from_fields_data_v2(each, rows)
    ]
    unpacked = HybridExtraList(lazy, rows, extra={}, dynamic_fields=[])
    reading = field.rewrite.reading
    reading.rows_out(unpacked, reading.fields(["*"]))
    for item, row in zip(field.items, unpacked, strict=True):
        assert set(row) == {"id", "vector"}
        [packed] = row["vector"]
        step = (
            {"float16": 2.0**-10, "bfloat16": 2.0**-7}[field.dtype]
            if field.metric == "COSINE"
            else 0
        )
        np.testing.assert_allclose(field.numbers(packed, DIM)[0], item, rtol=step, atol=0)


def test_a_row_that_was_read_can_be_written_again(field):
    packed = encode(field.items, field.dtype)
    assert field.packed([[each] for each in packed])["vector"] == field.packed(packed)["vector"]


def test_beside_its_biases_a_field_is_asked_for_as_it_is(metric):
    for dtype in KINDS:
        reranking = CandidateReranking(
            side_prefix="s", candidates=20, missed=0.0, allowed=0.01, queries=9
        )
        field = Field(dtype, metric, reranking)
        for strength in (1.0, 0.0):
            question = Question(field.queries, 5, overrides=Overrides(strength))
            asked = field.rewrite.ask(question).data
            assert asked == encode(field.queries, dtype)


@pytest.mark.parametrize(
    ("given", "refusal"),
    [(b"12", DimensionMismatch), (b"123", InvalidInput), ([0.5] * (DIM + 1), DimensionMismatch)],
)
def test_what_is_no_vector_of_the_field_is_refused(given, refusal):
    field = Field("bfloat16", "IP")
    with pytest.raises(refusal):
        vectors_of(field.state, [{"vector": given}])
    with pytest.raises(InvalidInput):
        field.rewrite.queries(Question([given], 3))


def test_other_vectors_are_copied_in_the_form_in_which_they_are_written():
    fields = [
        {"name": "id", "type": DataType.INT64},
        {"name": "bits", "type": DataType.BINARY_VECTOR, "params": {"dim": 16}},
        {"name": "small", "type": DataType.INT8_VECTOR, "params": {"dim": 2}},
        {"name": "half", "type": DataType.FLOAT16_VECTOR, "params": {"dim": 1}},
        {"name": "none", "type": DataType.BFLOAT16_VECTOR, "params": {"dim": 1}, "nullable": True},
        {"name": "sparse", "type": DataType.SPARSE_FLOAT_VECTOR},
    ]
    read = {
        "id": 3,
        "bits": [b"\x01\x02"],
        "small": [b"\xff\x01"],
        "half": [b"\x00\x3c"],
        "none": None,
    }
    read["sparse"] = {1: 0.5}
    [written] = milvus_schema.insertable_rows([read], {"fields": fields}, lite=False)
    assert written == {**read, "bits": b"\x01\x02", "small": b"\xff\x01", "half": b"\x00\x3c"}
    columns = Prepare.row_upsert_param("c", [written], "", fields).fields_data
    assert {column.field_name for column in columns} == set(read)


def test_searches_name_their_field_and_the_type_only_of_float32():
    state = Field("bfloat16", "IP").state
    assert field_arguments(state) == {"anns_field": "vector"}
    plain = state.model_copy(update={"dtype": "float32"})
    [described] = field_arguments(plain)["schema"]["fields"]
    assert described == {"name": "vector", "type": DataType.FLOAT_VECTOR}
