"""Collections to migrate, and all that is in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient

from tests.galleries import AWKWARD, rich_rows, rich_schema

DIM, ROWS = 16, 2_400
PARTITIONS = {"north": ("tenant 1", "tenant 2", "tenant 3"), "south": ("tenant 4", "tenant 5")}
"""Where rows have named partitions: the tenants in each. Others are in the default one."""

Rows = dict[int | str, dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """placement: by a partition key, in named partitions, or neither."""

    key: str
    metric: str
    index: str
    placement: str
    nullable: bool


def make_source(client: MilvusClient, name: str, shape: Shape, seed: int) -> None:
    """A loaded collection of every kind of field."""
    schema = rich_schema(client, shape.key, DIM)
    if shape.placement != "partition key":
        next(field for field in schema.fields if field.name == "tenant").is_partition_key = False
    if shape.nullable:
        schema.add_field("maybe", DataType.INT64, nullable=True)
    params = {"HNSW": {"M": 8, "efConstruction": 64}, "FLAT": {}}[shape.index]
    index = client.prepare_index_params(
        "vec", index_type=shape.index, metric_type=shape.metric, params=params
    )
    keyed = {"num_partitions": 4} if shape.placement == "partition key" else {}
    client.create_collection(name, schema=schema, index_params=index, **keyed)
    rows = rich_rows(np.random.default_rng(seed), ROWS, shape.key, DIM)
    for i, row in enumerate(rows):
        if shape.key == "varchar":
            row["pk"] = f"{AWKWARD[i % len(AWKWARD)]}{i:04d}"
        if shape.nullable and i % 3:
            row["maybe"] = i
    if shape.placement != "partitions":
        client.insert(name, rows)
        return
    for partition, tenants in PARTITIONS.items():
        client.create_partition(name, partition)
        client.insert(name, [row for row in rows if row["tenant"] in tenants], partition_name=partition)
    placed = {tenant for tenants in PARTITIONS.values() for tenant in tenants}
    client.insert(name, [row for row in rows if row["tenant"] not in placed])


def held(client: MilvusClient, name: str, *more: str) -> Rows:
    """All rows by key, with `more` fields. Milvus Lite opens with every collection released."""
    client.load_collection(name)
    read = client.query(name, filter="", output_fields=["*", *more], limit=16_384, consistency_level="Strong")
    return {row["pk"]: dict(row) for row in read}


def counted(client: MilvusClient, name: str) -> int:
    """Rows as the database counts them."""
    client.load_collection(name)
    [found] = client.query(name, filter="", output_fields=["count(*)"], consistency_level="Strong")
    return int(found["count(*)"])


def assert_same(found: Rows, wanted: Rows, *, within_a_unit: bool = False) -> None:
    """Keys, fields and vectors; the latter bit for bit, or within one unit in the last place."""
    missing, extra = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    assert not missing, f"{len(missing)} rows are lost: {sorted(missing, key=str)[:5]}"
    assert not extra, f"{len(extra)} rows too many: {sorted(extra, key=str)[:5]}"
    for key, row in wanted.items():
        theirs = found[key]
        assert {**theirs, "vec": 0} == {**row, "vec": 0}, f"row {key!r} differs"
        a, b = np.float32(theirs["vec"]), np.float32(row["vec"])
        same = np.allclose(a, b, rtol=2.0**-22, atol=0) if within_a_unit else np.array_equal(a, b)
        assert same, f"the vector of row {key!r} differs by {np.abs(a - b).max()}"
