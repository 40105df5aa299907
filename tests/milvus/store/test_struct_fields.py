"""Struct fields of every type are read, written and created again as pymilvus encodes them; no server."""

from types import SimpleNamespace

import numpy as np
import pytest
from pymilvus import CollectionSchema, DataType, MilvusClient
from pymilvus.client.abstract import CollectionSchema as Described
from pymilvus.client.entity_helper import extract_struct_array_from_column_data
from pymilvus.client.prepare import Prepare
from pymilvus.client.utils import convert_struct_fields_to_user_format
from pymilvus.grpc_gen import milvus_pb2

from milvus_hubness.jobs.store.records import VectorField
from milvus_hubness.milvus.store import schema as milvus_schema
from milvus_hubness.milvus.store import struct_schema

SUB_FIELDS = {
    "flag": (DataType.BOOL, {}, [True, False]),
    "tiny": (DataType.INT8, {}, [-5, 7]),
    "count": (DataType.INT64, {}, [2**60, 0]),
    "single": (DataType.FLOAT, {}, [0.5, -0.1]),
    "double": (DataType.DOUBLE, {}, [0.1, 1e300]),
    "text": (DataType.VARCHAR, {"max_length": 99}, ['"5" \\ ü', ""]),
    "whole": (DataType.FLOAT_VECTOR, {"dim": 2}, [[1.0, 0.1], [0.0, -3.0]]),
    "half": (DataType.FLOAT16_VECTOR, {"dim": 2}, [np.array([1, 0.1], np.float16)] * 2),
    "coarse": (DataType.BFLOAT16_VECTOR, {"dim": 2}, [b"\x01\x02\x03\x80", b"\x00\x00\x80\x3f"]),
    "bytes": (DataType.INT8_VECTOR, {"dim": 2}, [np.array([1, -2], np.int8)] * 2),
    "bits": (DataType.BINARY_VECTOR, {"dim": 16}, [b"\x01\x80", b"\xff\x00"]),
}
ROWS = [
    {"id": 7, "parts": [{n: values[i] for n, (*_, values) in SUB_FIELDS.items()} for i in (0, 1)]},
    {"id": 8, "parts": []},
    {"id": 9, "parts": [{name: values[1] for name, (*_, values) in SUB_FIELDS.items()}]},
]


def requested():
    schema = MilvusClient.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    parts = MilvusClient.create_struct_field_schema(description="of a page")
    for name, (data_type, options, _) in SUB_FIELDS.items():
        parts.add_field(name, data_type, **options, mmap_enabled=name == "text", warmup="sync")
    struct = {"element_type": DataType.STRUCT, "struct_schema": parts, "max_capacity": 9}
    schema.add_field("parts", DataType.ARRAY, **struct, mmap_enabled=True, warmup="async")
    return schema


def described(schema):
    """The description that a server would send of it, as `MilvusStore.info` reads it."""
    sent = Prepare.create_collection_request("c", schema).schema
    response = milvus_pb2.DescribeCollectionResponse(collection_name="c")
    response.schema.ParseFromString(sent)
    for struct in response.schema.struct_array_fields:
        for sub in struct.fields:
            sub.name = f"{struct.name}[{sub.name}]"
    raw = Described(raw=response).dict()
    structs = raw.pop("struct_array_fields")
    raw["fields"].extend(convert_struct_fields_to_user_format(structs))
    return struct_schema.with_settings(raw, {each["name"]: each["params"] for each in structs})


def sent(rows, schema):
    fields = [field for field in schema["fields"] if field["name"] == "id"]
    structs = [
        {**field, "fields": field["struct_fields"], "max_capacity": 9}
        for field in schema["fields"]
        if field["name"] == "parts"
    ]
    return Prepare.row_insert_param("c", rows, "", fields, struct_fields_info=structs)


def test_values_of_every_type_are_written_as_they_were_read():
    schema = described(requested())
    request = sent(ROWS, schema)
    [column] = [each for each in request.fields_data if each.field_name == "parts"]
    read = [
        {**row, "parts": extract_struct_array_from_column_data(column.struct_arrays, number)}
        for number, row in enumerate(ROWS)
    ]
    again = sent(milvus_schema.insertable_rows(read, schema, lite=False), schema)
    assert again == request


def test_a_copy_is_created_by_the_request_that_created_its_source():
    source = requested()
    copy = CollectionSchema.construct_from_dict(described(source))
    first, second = (Prepare.create_collection_request("c", each) for each in (source, copy))
    assert second.schema == first.schema
    assert struct_schema.differences(source, described(copy)) == []


def without(schema, *names):
    fields = [
        {
            **field,
            **(
                {"struct_fields": [s for s in field["struct_fields"] if s["name"] not in names]}
                if "struct_fields" in field
                else {}
            ),
        }
        for field in schema["fields"]
        if field["name"] not in names
    ]
    return {**schema, "fields": fields}


def test_what_a_server_leaves_out_or_changes_is_named():
    schema = described(requested())
    assert struct_schema.differences(requested(), without(schema, "half")) == [
        "it has no field 'parts[half]'"
    ]
    lacking = struct_schema.differences(requested(), without(schema, "parts"))
    assert lacking[0] == "it has no field 'parts'"
    other = described(requested())
    other["fields"][1]["struct_fields"][5]["params"]["max_length"] = 10
    other["fields"][1]["struct_fields"][0]["type"] = DataType.INT64
    assert struct_schema.differences(requested(), other) == [
        "field 'parts[flag]' is INT64, not BOOL",
        "max_length of field 'parts[text]' is 10, not 99",
    ]


REFUSED = {
    "MAX_SIM_L2": "adds up squared distances",
    "MAX_SIM_HAMMING": "are corrected for MAX_SIM_IP and MAX_SIM_COSINE",
    "MAX_SIM_JACCARD": "are corrected for MAX_SIM_IP and MAX_SIM_COSINE",
    "COSINE": "the metric COSINE of single vectors: ",
    "": "has no index, so its metric is unknown: create an index first",
}


@pytest.mark.parametrize("metric", [*REFUSED, "MAX_SIM_IP", "MAX_SIM_COSINE"])
def test_the_metric_of_an_index_decides_whether_structs_are_corrected(metric):
    schema = described(requested())
    index = {"field_name": "parts[whole]", "index_type": "HNSW", "metric_type": metric}
    fields = milvus_schema.vector_fields(schema, [index] if metric else [])
    assert fields["parts[whole]"].multi_vectors
    source = SimpleNamespace(name="c", schema=schema, vector_fields=fields, states={})
    reasons = milvus_schema.obstacles(source, "parts[whole]", "", lite=False)
    if metric not in REFUSED:
        assert reasons == []
        assert fields["parts[whole]"] == VectorField(
            "parts[whole]", 2, metric.removeprefix("MAX_SIM_"), "HNSW", multi_vectors=True
        )
        return
    [reason] = reasons
    assert REFUSED[metric] in reason
    assert "\n" not in reason


@pytest.mark.parametrize("name", ["half", "coarse"])
def test_vectors_of_16_bits_in_structs_are_refused(name):
    schema = described(requested())
    index = {"field_name": f"parts[{name}]", "metric_type": "MAX_SIM_IP"}
    fields = milvus_schema.vector_fields(schema, [index])
    source = SimpleNamespace(name="c", schema=schema, vector_fields=fields, states={})
    [reason] = milvus_schema.obstacles(source, f"parts[{name}]", "", lite=False)
    assert "only FLOAT_VECTOR is corrected" in reason
