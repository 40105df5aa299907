"""Collections to migrate, and all that is in them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient

from tests.galleries import AWKWARD, rich_rows, rich_schema, vectors

DIM, ROWS, TOUCHED = 16, 2_400, 8
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


def make_source(
    client: MilvusClient,
    name: str,
    shape: Shape,
    seed: int,
    *,
    count: int = ROWS,
    more: Mapping[str, tuple[dict[str, Any], Any]] | None = None,
) -> None:
    """A loaded collection of every kind of field. more: fields by name, with what each is and what all rows
    hold there."""
    more = more or {}
    schema = rich_schema(client, shape.key, DIM)
    for field, (kind, _) in more.items():
        schema.add_field(field, **kind)
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
    rows = rich_rows(np.random.default_rng(seed), count, shape.key, DIM)
    for i, row in enumerate(rows):
        row |= {field: value for field, (_, value) in more.items()}
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


@dataclass(frozen=True)
class Change:
    """What an application does in one go: rows that it changes or adds, of the rows that are there, and keys
    of those it deletes. partition: where all of them are."""

    rows: list[dict[str, Any]]
    gone: list[int | str]
    partition: str

    def made(self, reference: Rows) -> None:
        """It was made to these too."""
        for row in self.rows:
            reference[row["pk"]] = dict(row)
        for key in self.gone:
            reference.pop(key, None)


def drawn_change(there: Rows, shape: Shape, rng: random.Random, new: int) -> Change:
    """Eight rows changed, eight added and eight deleted. new: the number of the first that is added."""
    partition = "north" if shape.placement == "partitions" else ""
    tenants = PARTITIONS.get(partition)
    keys = sorted(key for key, row in there.items() if not tenants or row["tenant"] in tenants)
    first = rng.randrange(len(keys) - 3 * TOUCHED)
    models = keys[first : first + 3 * TOUCHED]
    fresh = vectors(np.random.default_rng(new), 2 * TOUCHED, DIM)
    rows = []
    for i, vector in enumerate(fresh):
        key = models[i] if i < TOUCHED else type(models[0])(new + i)
        rows.append({**there[models[i]], "pk": key, "count": new + i, "vec": vector.tolist()})
    return Change(rows, models[-TOUCHED:], partition)


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
