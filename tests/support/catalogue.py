"""A catalogue twice, plain and corrected, and the comparison of what callers see of either."""

import re

import numpy as np
import pytest
from pymilvus import DataType
from pymilvus.exceptions import MilvusException

from milvus_hubness import NNN, QueryBank, Recipe, migrate, plan_correction
from milvus_hubness.jobs.store.records import IDENTITY_PROPERTY
from tests.support.galleries import as_distance, nnn, similarity, vectors

DIM, ITEMS, QUERIES, BANK, K, ALPHA = 18, 200, 6, 50, 5, 0.75
STORED_WIDTH = 32
PARTITIONS = {"_default": range(80), "autumn": range(80, 140), "spring": range(140, ITEMS)}
ACCURACY = 1e-5
"""Of scores."""
BESIDE_THE_ITEMS = ("extra", "recalls", "agg_buckets", "ids", "distances")
KINDS = [("COSINE", "str"), ("IP", "int"), ("L2", "int")]


class Catalogue:
    """The same rows twice, in three partitions: plain, and corrected."""

    def __init__(self, backend, metric, kind):
        rng = np.random.default_rng(61)
        self.backend, self.metric, self.kind = backend, metric, kind
        self.key_field = "id" if kind == "int" else "sku"
        self.first = 1_000
        self.items, self.queries = vectors(rng, ITEMS, DIM), vectors(rng, QUERIES, DIM)
        self.fresh, self.bank = vectors(rng, 8, DIM), vectors(rng, BANK, DIM)
        self.plain, self.name = backend.client(), backend.name("catalogue")
        self.make()
        store = backend.store()
        plan = plan_correction(
            store, self.name, Recipe(QueryBank(self.bank), estimator=NNN(K, ALPHA))
        )
        self.corrected = migrate(store, plan, no_writers=True).target
        if backend.is_lite:
            # The migration's note on its source would tell the two apart.
            self.plain.drop_collection_properties(self.name, [IDENTITY_PROPERTY])
        self.client = backend.hubness_client(strength=0)
        self.sides = ((self.plain, self.name), (self.client, self.corrected))

    def make(self):
        schema = self.plain.create_schema(enable_dynamic_field=True)
        if self.kind == "int":
            schema.add_field("id", DataType.INT64, is_primary=True)
        else:
            schema.add_field("sku", DataType.VARCHAR, max_length=40, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
        schema.add_field("group", DataType.INT64)
        schema.add_field("price", DataType.FLOAT)
        schema.add_field("weight", DataType.DOUBLE)
        schema.add_field("title", DataType.VARCHAR, max_length=20)
        schema.add_field("tags", DataType.ARRAY, element_type=DataType.INT64, max_capacity=4)
        schema.add_field("document", DataType.JSON)
        schema.add_field("flag", DataType.BOOL)
        index = self.plain.prepare_index_params(
            "vector", index_type="FLAT", metric_type=self.metric
        )
        self.plain.create_collection(
            self.name, schema=schema, index_params=index, consistency_level="Strong"
        )
        for partition, numbers in PARTITIONS.items():
            if partition != "_default":
                self.plain.create_partition(self.name, partition)
            self.plain.insert(self.name, [self.row(i) for i in numbers], partition_name=partition)
        self.plain.flush(self.name)

    def key(self, number):
        return number if self.kind == "int" else f"sku-{number:04d}"

    def keys(self, *numbers):
        return [self.key(number) for number in numbers]

    def row(self, number, vector=None, **changed):
        return {
            self.key_field: self.key(number),
            "vector": self.items[number] if vector is None else vector,
            "group": number % 5,
            "price": number / 7,
            "weight": number / 7,
            "title": f"title {number}",
            "tags": list(range(number % 4)),
            "document": {"n": number, "deep": [1, None, {"x": number / 3}]},
            "flag": number % 2 == 0,
            "note": f"n{number}",
            **({"rare": number} if number % 10 == 0 else {}),
            **changed,
        }

    def new(self, **changed):
        """Rows that are not there yet. changed: fields of all of them."""
        return [{**self.row(self.first + i, self.fresh[i]), **changed} for i in range(4)]

    def new_without(self, field, group=None):
        """The same without this field, or only those of this group without it."""
        return [
            {
                name: value
                for name, value in row.items()
                if name != field or group not in (None, row["group"])
            }
            for row in self.new()
        ]

    @property
    def is_new(self):
        return f"{self.key_field} >= {self.key(self.first)!r}".replace("'", '"')

    def scores(self, queries, strength):
        """(m, n) scores by the definition, as Milvus reports this metric's."""
        mean_bias = self.client.hubness_state(self.corrected).profile.mean_bias
        biases = nnn(self.bank, self.items, self.metric, K, ALPHA) - mean_bias
        return as_distance(
            similarity(queries, self.items, self.metric) - strength * biases, self.metric
        )

    def best_first(self, scores):
        return np.argsort(scores if self.metric == "L2" else -scores)

    def ring(self, query=0, strength=0.0, near=5, far=60):
        """Bounds between which the hits from place `near` to place `far` lie."""
        [scores] = self.scores(self.queries[query : query + 1], strength)
        ordered = scores[self.best_first(scores)]
        between = (ordered[1:] + ordered[:-1]) / 2
        return {"range_filter": float(between[near - 1]), "radius": float(between[far - 1])}


def outcome(call, *args):
    """What a caller gets: an answer, or an exception."""
    try:
        return call(*args)
    except Exception as error:
        return error


def assert_same(catalogue, expected, got, at="answer"):
    """Equal in all that a caller can see: types, keys, values, and what hangs on them."""
    assert type(got) is type(expected), f"{at}: {expected!r}, but {got!r}"
    if isinstance(expected, Exception):
        assert_refused_alike(catalogue, expected, got)
    elif isinstance(expected, dict):
        # Milvus 2.3.5 sends the fields of a row in another order each time.
        in_order = list if catalogue.backend.is_lite else sorted
        assert in_order(got) == in_order(expected), at
        for name in expected:
            assert_same(catalogue, expected[name], got[name], f"{at}[{name!r}]")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), at
        for i, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert_same(catalogue, a, b, f"{at}[{i}]")
    elif isinstance(expected, float | np.floating):
        assert got == pytest.approx(expected, rel=2.4e-7, abs=ACCURACY), at
    else:
        assert got == expected, at
    for name in BESIDE_THE_ITEMS:
        if hasattr(expected, name):
            assert_same(catalogue, getattr(expected, name), getattr(got, name), f"{at}.{name}")


def assert_refused_alike(catalogue, expected, got):
    """The same class and code, and not a word of what only we put there."""
    assert isinstance(expected, Exception)
    assert type(got) is type(expected), f"{expected!r} {expected}, but {got!r} {got}"
    if isinstance(expected, MilvusException):
        assert got.code == expected.code
    said = str(got).replace(catalogue.corrected, "")
    assert "hubness" not in said
    assert not re.search(rf"\b{STORED_WIDTH}\b", said)


def rows_there(c, n, g):
    """The rows that a test put there."""
    return sorted(
        c.query(n, filter=g.is_new, output_fields=["*"]), key=lambda row: row[g.key_field]
    )


def assert_lives_alike(catalogue, steps):
    for i, step in enumerate(steps):
        expected, got = (outcome(step, client, name, catalogue) for client, name in catalogue.sides)
        assert_same(catalogue, expected, got, f"step {i}")
