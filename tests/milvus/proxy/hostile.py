"""Malformed and hostile messages for the proxy, drawn by a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy as np
from pymilvus.grpc_gen import common_pb2, milvus_pb2, schema_pb2

from milvus_hubness.milvus.proxy.messages import request_type
from milvus_hubness.milvus.proxy.operations import REWRITTEN, SEARCHES

DIM = 12
KINDS = common_pb2.PlaceholderType.values()
STRANGE_NUMBERS = ["nan", "inf", "-1e400", "", "x", "1" * 5_000, "0x10", "None", "[]", "१"]
STRANGE_PARAMS = [
    "{",
    "[]",
    "null",
    "[" * 100_000,
    '{"a":' * 50_000,
    '{"radius": "x"}',
    '{"range_filter": [1]}',
    '{"hubness_strength": {}}',
    '{"hubness_profile": 5}',
    '{"hubness_strength": 1e400}',
    '{"hubness_strength": NaN}',
    '{"hubness_kinds": [1]}',
    '{"hubness_kinds": -1}',
    "9" * 5_000,
    "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
]
BROKEN_WIRE = [
    b"\xff\xff",
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x80" * 50,
    b"\x0b" * 200,
    b"\x0c",
    b"\x07\x00",
    b"\x00",
    b"\x1a\x04abc",
    bytes(range(256)) * 20,
]


def group_of(values: list[bytes], kind: int = 101) -> bytes:
    placeholder = common_pb2.PlaceholderValue(tag="$0", values=values)
    placeholder.type = kind  # type: ignore[assignment]
    return common_pb2.PlaceholderGroup(placeholders=[placeholder]).SerializeToString()


def search_of(
    collection: str, params: dict[str, str] | None = None, group: bytes | None = None
) -> milvus_pb2.SearchRequest:
    values = [np.ones(DIM, np.float32).tobytes()]
    request = milvus_pb2.SearchRequest(collection_name=collection, nq=1, output_fields=["id"])
    request.placeholder_group = group_of(values) if group is None else group
    pairs = {"anns_field": "vector", "topk": "3", "params": "{}", **(params or {})}
    request.search_params.extend(
        common_pb2.KeyValuePair(key=name, value=value) for name, value in pairs.items()
    )
    return request


def insert_of(
    collection: str, dim: int = DIM, rows: int = 2, numbers: list[float] | None = None
) -> milvus_pb2.InsertRequest:
    request = milvus_pb2.InsertRequest(collection_name=collection, num_rows=rows)
    vector = schema_pb2.VectorField(
        dim=dim,
        float_vector=schema_pb2.FloatArray(data=[0.5] * (DIM * 2) if numbers is None else numbers),
    )
    keys = schema_pb2.ScalarField(long_data=schema_pb2.LongArray(data=[70_001, 70_002]))
    request.fields_data.add(type=5, field_name="id", scalars=keys)
    request.fields_data.add(type=101, field_name="vector", vectors=vector)
    return request


def searches(collection: str, rng: random.Random) -> Iterator[milvus_pb2.SearchRequest]:
    """Searches that protobuf can parse."""
    good = np.ones(DIM, np.float32)
    wrong = [DIM + 1, DIM - 1, 0, 1, 5_000]
    for length in wrong:
        yield search_of(collection, group=group_of([np.ones(length, np.float32).tobytes()]))
    for kind in KINDS:
        yield search_of(collection, group=group_of([good.tobytes()], kind))
    for kind in (-1, 7, 2**31 - 1):
        yield search_of(collection, group=group_of([good.tobytes()], kind))
    for value in (np.nan, np.inf, -np.inf, 3e38):
        yield search_of(collection, group=group_of([np.full(DIM, value, np.float32).tobytes()]))
    texts = ["é" * 24, "a" * 48, "", "\x00" * 48]
    for text in texts:
        yield search_of(collection, group=group_of([text.encode()], rng.choice(KINDS)))
    for group in (b"", b"\xff", group_of([]), group_of([b"", b""]), *BROKEN_WIRE):
        yield search_of(collection, group=group)
    mixed = common_pb2.PlaceholderGroup()
    mixed.placeholders.add(tag="$0", type=101, values=[good.tobytes()])  # type: ignore[arg-type]
    mixed.placeholders.add(tag="$1", type=21, values=[b"text"])  # type: ignore[arg-type]
    yield search_of(collection, group=mixed.SerializeToString())
    for name in (
        "topk",
        "offset",
        "round_decimal",
        "hubness_strength",
        "hubness_kinds",
        "group_size",
        "anns_field",
        "metric_type",
    ):
        for value in STRANGE_NUMBERS:
            yield search_of(collection, {name: value})
    for params in STRANGE_PARAMS:
        yield search_of(collection, {"params": params})
    for name, value in (("nq", 0), ("nq", -5), ("nq", 2**62), ("guarantee_timestamp", 2**63)):
        request = search_of(collection)
        setattr(request, name, value)
        yield request
    for value in ("hubness_bias", "*", "", "x" * 100_000, "vector"):
        request = search_of(collection)
        request.output_fields.append(value)
        yield request
    request = search_of(collection)
    request.ids.int_id.data.extend([1, -1, 2**62])
    yield request
    request = search_of(collection)
    request.ids.str_id.data.append("a key of another type")
    yield request
    for dsl in ("(" * 2_000, "id in [" + "1," * 20_000 + "1]", "\x00", "id == '", "🦆" * 500):
        request = search_of(collection)
        request.dsl = dsl
        yield request


def writes(collection: str, rng: random.Random) -> Iterator[milvus_pb2.InsertRequest]:
    for dim in (0, -1, 1, DIM + 1, 2**40):
        yield insert_of(collection, dim=dim)
    for rows in (0, 1, 3, 2**32 - 1):
        yield insert_of(collection, rows=rows)
    for value in (float("nan"), float("inf"), 0.0):
        yield insert_of(collection, numbers=[value] * (2 * DIM))
    yield insert_of(collection, numbers=[])
    yield insert_of(collection, numbers=[1.0] * (2 * DIM - 1))
    for kind in ("float16_vector", "binary_vector", "int8_vector", "bfloat16_vector"):
        request = insert_of(collection)
        setattr(request.fields_data[1].vectors, kind, rng.randbytes(2 * 2 * DIM))
        yield request
    request = insert_of(collection)
    request.fields_data.append(request.fields_data[1])
    yield request
    request = insert_of(collection)
    del request.fields_data[1:]
    yield request
    for text in (
        b'{"hubness_bias": 1}',
        b'"hubness_bias"',
        b'{"hubness_bias"',
        b"[" * 90_000 + b'"hubness_bias"',
    ):
        request = insert_of(collection)
        dynamic = schema_pb2.ScalarField(json_data=schema_pb2.JSONArray(data=[text] * 2))
        request.fields_data.add(type=23, field_name="$meta", is_dynamic=True, scalars=dynamic)
        yield request


STRANGE_RANKERS: list[dict[str, str]] = [
    {},
    {"strategy": "x"},
    {"params": "["},
    {"params": "[" * 100_000},
    {"params": '{"weights": "x"}', "strategy": "weighted"},
    {"params": '{"weights": [NaN, 1]}', "strategy": "weighted"},
    {"params": '{"k": []}', "strategy": "rrf"},
    {"limit": "nan"},
    {"limit": "{}"},
    {"limit": "9" * 5_000},
    {"offset": "-9" * 3_000},
]


def hybrids(collection: str) -> Iterator[milvus_pb2.HybridSearchRequest]:
    for pairs in STRANGE_RANKERS:
        request = milvus_pb2.HybridSearchRequest(
            collection_name=collection, requests=[search_of(collection)] * 2
        )
        request.rank_params.extend(
            common_pb2.KeyValuePair(key=k, value=v) for k, v in pairs.items()
        )
        yield request
    broken = search_of(collection, group=b"\xff")
    for requests in ([], [broken] * 2):
        yield milvus_pb2.HybridSearchRequest(collection_name=collection, requests=requests)


def hostile_messages(
    collection: str, seed: int, count: int
) -> list[tuple[str, bytes, list[tuple[str, str]]]]:
    """Return `count` calls: a method, its message and its metadata. Each kind is there, if `count` allows."""
    rng = random.Random(seed)
    calls: list[tuple[str, bytes, list[tuple[str, str]]]] = []
    calls += [("Search", request.SerializeToString(), []) for request in searches(collection, rng)]
    calls += [
        (rng.choice(["Insert", "Upsert"]), request.SerializeToString(), [])
        for request in writes(collection, rng)
    ]
    calls += [("HybridSearch", request.SerializeToString(), []) for request in hybrids(collection)]
    good = search_of(collection).SerializeToString()
    for value in STRANGE_NUMBERS:
        shown = value if value.isascii() else "?"
        calls.append(("Search", good, [("hubness-strength", shown)]))
        calls.append(("Search", good, [("hubness-kinds", shown)]))
        calls.append(("Search", good, [("hubness-profile", shown)]))
    for token in ("?", "=", "Bearer x", "AAAA", "/" * 3_000):
        calls.append((rng.choice(["Search", "Query"]), good, [("authorization", token)]))

    methods = [*REWRITTEN, *SEARCHES]
    for method in methods:
        calls += [(method, wire, []) for wire in BROKEN_WIRE]
    for method in (
        "Nothing",
        "search",
        "../Search",
        "Search/",
        "Flush",
        "Connect",
        "ShowCollections",
    ):
        calls += [(method, rng.choice(BROKEN_WIRE), []), (method, good, [])]

    # Messages of one method for another, cut, changed in some bytes, or longer.
    seeds = [message for _, message, _ in calls if 10 < len(message) < 100_000]
    while len(calls) < count:
        message = bytearray(rng.choice(seeds))
        change = rng.randrange(4)
        if change == 0:
            del message[rng.randrange(len(message)) :]
        elif change == 1:
            for _ in range(rng.randrange(1, 6)):
                message[rng.randrange(len(message))] = rng.randrange(256)
        elif change == 2:
            message += rng.choice(BROKEN_WIRE)
        method = rng.choice(methods) if change == 3 or rng.random() < 0.2 else "Search"
        calls.append((method, bytes(message), []))
    rng.shuffle(calls)
    # None of them drops the collection by name, or empties it.
    return [call for call in calls[:count] if not destroys(*call[:2], collection)]


def destroys(method: str, message: bytes, collection: str) -> bool:
    """Return whether a message, as far as it can be parsed, drops, empties or renames the collection."""
    if not method.startswith(("Drop", "Truncate", "Rename", "Delete")):
        return False
    try:
        request = request_type(method)._concrete_class.FromString(message)
    except Exception:
        return False
    return collection in str(request)


def as_json(call: tuple[str, bytes, list[tuple[str, str]]]) -> str:
    """Return a call as a message of a test shows it."""
    method, message, metadata = call
    return json.dumps([method, message[:200].hex(), len(message), metadata])
