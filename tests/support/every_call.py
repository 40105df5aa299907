"""Every call of a MilvusClient on a plain collection beside the same call of a client whose strength is 0 on
the same rows corrected. Whoever compares what comes back must not be able to tell which is which."""

import numpy as np
import pytest
from pymilvus.client.types import LoadState
from pymilvus.exceptions import MilvusException

from milvus_hubness import NNN, CorrectionConfig, QueryBank, Recipe
from tests.support.catalogue import (
    ACCURACY,
    DIM,
    ITEMS,
    KINDS,
    PARTITIONS,
    STORED_WIDTH,
    K,
    assert_lives_alike,
    assert_refused_alike,
    assert_same,
    outcome,
    rows_there,
)
from tests.support.galleries import vectors

MADE = {
    "either": {"catalogue": KINDS[:2]},
    "test_an_index_is_dropped_and_built_as_there": {
        "catalogue": [("IP", "int")],
        "running": ["lite"],
    },
}
"""Of a suite: see tests.support.tiers."""
OF_THE_COLLECTION = {
    "collection_name",
    "collection_id",
    "created_timestamp",
    "update_timestamp",
    "schema_version",
}

SEARCHES = {
    "one query": lambda g: {"data": [g.queries[0]]},
    "a matrix of queries": lambda g: {"data": g.queries},
    "queries as lists": lambda g: {"data": g.queries.astype(float).tolist()},
    "queries in double precision": lambda g: {"data": list(g.queries.astype(float))},
    "integers": lambda g: {"data": [[1, 2, 3] * 6]},
    "a filter": lambda g: {"filter": "group in [1, 3] and price < 20"},
    "a filter that nothing passes": lambda g: {"filter": "group == 99"},
    "a filter on a dynamic field": lambda g: {
        "filter": 'note like "n1%"',
        "output_fields": ["note"],
    },
    "a filter on json": lambda g: {"filter": 'document["n"] < 50 and flag == true'},
    "no filter": lambda g: {"filter": None},
    "no fields": lambda g: {"output_fields": []},
    "all fields": lambda g: {"output_fields": ["*"]},
    "some fields": lambda g: {
        "output_fields": ["group", "price", "weight", "tags", "document", "flag"]
    },
    "the vector": lambda g: {"output_fields": ["vector"]},
    "the key": lambda g: {"output_fields": [g.key_field]},
    "dynamic fields": lambda g: {"output_fields": ["note", "rare"]},
    "the vector and dynamic fields": lambda g: {"output_fields": ["rare", "vector", "title"]},
    "all fields and the vector": lambda g: {"output_fields": ["*", "vector"]},
    "all dynamic fields": lambda g: {"output_fields": ["$meta"]},
    "a field that no row has": lambda g: {"output_fields": ["nowhere"]},
    "a partition": lambda g: {"partition_names": ["spring"]},
    "two partitions": lambda g: {
        "data": [g.queries[0]],
        "partition_names": ["autumn", "_default"],
        "limit": 90,
    },
    "no partitions named": lambda g: {"partition_names": []},
    "an offset": lambda g: {"offset": 5, "limit": 4},
    "no offset": lambda g: {"offset": None},
    "an offset among the parameters": lambda g: {"search_params": {"offset": 5}, "limit": 4},
    "more than there is": lambda g: {"data": [g.queries[0]], "limit": 1_000},
    "a radius": lambda g: {
        "data": [g.queries[0]],
        "search_params": {"params": {"radius": g.ring()["radius"]}},
        "limit": 100,
    },
    "a ring": lambda g: {
        "data": [g.queries[0]],
        "search_params": {"params": g.ring()},
        "limit": 100,
    },
    "a ring without params": lambda g: {
        "data": [g.queries[0]],
        "search_params": g.ring(),
        "limit": 100,
    },
    "a ring and a filter": lambda g: {
        "data": [g.queries[1]],
        "search_params": {"params": g.ring(1)},
        "filter": "flag == true",
        "output_fields": ["vector"],
    },
    "groups": lambda g: {"group_by_field": "group", "output_fields": ["group"]},
    "groups by text": lambda g: {"group_by_field": "title"},
    "groups of three": lambda g: {
        "group_by_field": "group",
        "group_size": 3,
        "strict_group_size": True,
    },
    "Strong": lambda g: {"consistency_level": "Strong"},
    "Bounded": lambda g: {"consistency_level": "Bounded"},
    "Session": lambda g: {"consistency_level": "Session"},
    "Eventually": lambda g: {"consistency_level": "Eventually"},
    "a level by number": lambda g: {"consistency_level": 0},
    "parameters of the index": lambda g: {"search_params": {"params": {"nprobe": 4}}},
    "parameters of the index without params": lambda g: {"search_params": {"nprobe": 4}},
    "no parameters": lambda g: {"search_params": {"params": {}}},
    "the metric": lambda g: {"search_params": {"metric_type": g.metric, "params": {}}},
    "the field by name": lambda g: {"anns_field": "vector"},
    "a timeout": lambda g: {"timeout": 20},
    "sealed rows only": lambda g: {"search_params": {"ignore_growing": True}},
    "an option nobody knows": lambda g: {"what_is_this": 3},
}

RANKED = {
    "all": (lambda g: {}, lambda i: True),
    "a filter": (lambda g: {"filter": "group in [1, 3]"}, lambda i: i % 5 in (1, 3)),
    "a filter on json": (lambda g: {"filter": 'document["n"] < 50'}, lambda i: i < 50),
    "a partition": (lambda g: {"partition_names": ["spring"]}, PARTITIONS["spring"].__contains__),
    "fields": (lambda g: {"output_fields": ["*"]}, lambda i: True),
    "an offset": (lambda g: {"offset": 7, "limit": 5}, lambda i: True),
    "an offset among the parameters": (lambda g: {"search_params": {"offset": 7}}, lambda i: True),
    "an offset and a filter": (
        lambda g: {"offset": 3, "filter": "flag == true"},
        lambda i: i % 2 == 0,
    ),
    "parameters of the index": (lambda g: {"search_params": {"nprobe": 4}}, lambda i: True),
    "rounded": (lambda g: {"round_decimal": 5}, lambda i: True),
}

READS = {
    "a filter": lambda c, n, g: c.query(n, filter="group == 2"),
    "some fields": lambda c, n, g: c.query(n, filter="price < 2", output_fields=["title", "price"]),
    "all fields": lambda c, n, g: c.query(n, filter="price < 2", output_fields=["*"]),
    "all fields and the vector": lambda c, n, g: c.query(
        n, "price < 2", output_fields=["*", "vector"]
    ),
    "the vector": lambda c, n, g: c.query(n, filter="price < 2", output_fields=["vector"]),
    "dynamic fields": lambda c, n, g: c.query(
        n, filter="price < 2", output_fields=["rare", "note"]
    ),
    "json and arrays": lambda c, n, g: c.query(
        n, filter="price < 2", output_fields=["document", "tags"]
    ),
    "all dynamic fields": lambda c, n, g: c.query(n, filter="price < 2", output_fields=["$meta"]),
    "the key": lambda c, n, g: c.query(n, filter="price < 2", output_fields=[g.key_field]),
    "no fields": lambda c, n, g: c.query(n, filter="price < 2", output_fields=[]),
    "a field that no row has": lambda c, n, g: c.query(
        n, filter="price < 2", output_fields=["nowhere"]
    ),
    "a limit": lambda c, n, g: c.query(n, filter="group == 2", limit=3),
    "a limit and an offset": lambda c, n, g: c.query(n, filter="group == 2", limit=3, offset=4),
    "a limit and no filter": lambda c, n, g: c.query(n, limit=3),
    "no row": lambda c, n, g: c.query(n, filter="group == 99"),
    "partitions": lambda c, n, g: c.query(
        n, filter="group == 2", partition_names=["spring", "autumn"]
    ),
    "ids": lambda c, n, g: c.query(n, ids=g.keys(3, 4)),
    "one id": lambda c, n, g: c.query(n, ids=g.key(3), output_fields=["vector"]),
    "a level and a timeout": lambda c, n, g: c.query(
        n, "group == 2", consistency_level=0, timeout=20
    ),
    "a count": lambda c, n, g: c.query(n, output_fields=["count(*)"]),
    "a count of some": lambda c, n, g: c.query(n, filter="group == 2", output_fields=["count(*)"]),
    "a count of none": lambda c, n, g: c.query(n, filter="group == 99", output_fields=["count(*)"]),
    "a count in a partition": lambda c, n, g: c.query(
        n, partition_names=["spring"], output_fields=["count(*)"]
    ),
    "get one": lambda c, n, g: c.get(n, g.key(3)),
    "get some": lambda c, n, g: c.get(n, g.keys(3, 7, 150)),
    "get the same twice": lambda c, n, g: c.get(n, g.keys(3, 3)),
    "get one that is missing": lambda c, n, g: c.get(n, g.keys(3, 9_999)),
    "get only one that is missing": lambda c, n, g: c.get(n, g.key(9_999)),
    "get none": lambda c, n, g: c.get(n, []),
    "get the vector": lambda c, n, g: c.get(n, g.keys(3, 4), output_fields=["vector"]),
    "get some fields": lambda c, n, g: c.get(n, g.keys(3, 10), output_fields=["title", "rare"]),
    "get from a partition": lambda c, n, g: c.get(n, g.keys(3, 150), partition_names=["spring"]),
    "pages of rows": lambda c, n, g: list(
        c.query_iterator(n, batch_size=50, partition_names=["spring"], output_fields=["*"]).next()
    ),
    "pages of hits": lambda c, n, g: list(
        c.search_iterator(
            n, data=[g.queries[0]], batch_size=9, partition_names=["spring"], output_fields=["*"]
        ).next()
    ),
    "the collection": lambda c, n, g: {
        name: value
        for name, value in c.describe_collection(n).items()
        if name not in OF_THE_COLLECTION
    },
    "names of indexes": lambda c, n, g: [c.list_indexes(n), c.list_indexes(n, "vector")],
    "the index": lambda c, n, g: c.describe_index(n, "vector"),
    "no index": lambda c, n, g: c.describe_index(n, "nowhere"),
    "numbers of rows": lambda c, n, g: [
        c.get_collection_stats(n),
        c.get_partition_stats(n, "spring"),
    ],
    "whether it is there": lambda c, n, g: [c.has_collection(n), c.has_collection("nowhere")],
    "names of partitions": lambda c, n, g: c.list_partitions(n),
    "whether partitions are there": lambda c, n, g: [
        c.has_partition(n, each) for each in ("spring", "no")
    ],
    "whether it is loaded": lambda c, n, g: [c.get_load_state(n), c.get_load_state(n, "spring")],
    # In another database than the default one, Milvus 2.3.5 finds no collection whose aliases it could list.
    "aliases": lambda c, n, g: outcome(lambda c, n, g: c.list_aliases(n)["aliases"], c, n, g),
    # It lists databases in another order each time.
    "the server": lambda c, n, g: [c.get_server_version(), sorted(c.list_databases())],
}


def changed(g, **fields):
    return {g.key_field: g.key(g.first + 1), **fields}


def insert(c, n, g):
    return c.insert(n, g.new())


WRITES = {
    "insert": [insert],
    "insert one": [lambda c, n, g: c.insert(n, g.new()[0])],
    "insert none": [lambda c, n, g: c.insert(n, [])],
    "insert twice": [insert, insert],
    "insert lists": [lambda c, n, g: c.insert(n, g.new(vector=g.fresh[4].tolist()))],
    "insert in double precision": [
        lambda c, n, g: c.insert(n, g.new(vector=g.fresh[4].astype(float)))
    ],
    "insert integers": [lambda c, n, g: c.insert(n, g.new(vector=[1, 2, 3] * 6))],
    "insert tuples": [lambda c, n, g: c.insert(n, g.new(vector=tuple(g.fresh[4].tolist())))],
    "insert numpy's numbers": [
        lambda c, n, g: c.insert(n, g.new(group=np.int64(3), price=np.float32(0.5)))
    ],
    "insert further dynamic fields": [lambda c, n, g: c.insert(n, g.new(brand={"new": [1]}))],
    "insert without dynamic fields": [lambda c, n, g: c.insert(n, g.new_without("note"))],
    "insert in another order": [
        lambda c, n, g: c.insert(n, [dict(reversed(row.items())) for row in g.new()])
    ],
    "insert in time": [lambda c, n, g: c.insert(n, g.new(), timeout=20)],
    "insert into a partition": [
        lambda c, n, g: c.insert(n, g.new(), partition_name="spring"),
        lambda c, n, g: c.query(
            n, g.is_new, partition_names=["spring"], output_fields=["count(*)"]
        ),
    ],
    "insert into no partition": [lambda c, n, g: c.insert(n, g.new(), partition_name=None)],
    "upsert": [lambda c, n, g: c.upsert(n, g.new())],
    "upsert none": [lambda c, n, g: c.upsert(n, [])],
    "upsert what is there": [
        insert,
        lambda c, n, g: c.upsert(n, g.row(g.first, g.fresh[5], title="again")),
    ],
    "upsert into a partition": [lambda c, n, g: c.upsert(n, g.new(), partition_name="spring")],
    "delete one": [insert, lambda c, n, g: c.delete(n, g.key(g.first))],
    "delete some": [insert, lambda c, n, g: c.delete(n, ids=g.keys(g.first, g.first + 1))],
    "delete by pks": [insert, lambda c, n, g: c.delete(n, pks=g.keys(g.first, g.first + 1))],
    "delete what is missing": [lambda c, n, g: c.delete(n, ids=g.keys(9_999))],
    "delete by filter": [insert, lambda c, n, g: c.delete(n, filter=f"{g.is_new} and group == 1")],
    "delete from partitions": [
        lambda c, n, g: c.insert(n, g.new(), partition_name="spring"),
        lambda c, n, g: c.delete(n, ids=g.keys(g.first), partition_name="autumn"),
        rows_there,
        lambda c, n, g: c.delete(n, ids=g.keys(g.first), partition_name="spring"),
    ],
}

PARTIAL = {
    "a field": [
        insert,
        lambda c, n, g: c.upsert(n, changed(g, title="changed"), partial_update=True),
    ],
    "a vector": [
        insert,
        lambda c, n, g: c.upsert(n, [changed(g, vector=g.fresh[6])], partial_update=True),
    ],
    "a dynamic field": [
        insert,
        lambda c, n, g: c.upsert(n, changed(g, note="changed"), partial_update=True),
    ],
    "a row that is missing": [
        lambda c, n, g: c.upsert(n, changed(g, title="new"), partial_update=True)
    ],
    "different fields": [
        insert,
        lambda c, n, g: c.upsert(
            n, [changed(g, title="changed"), g.new_without("title")[2]], partial_update=True
        ),
    ],
}

LIVES = {
    "partitions": [
        lambda c, n, g: c.create_partition(n, "winter"),
        lambda c, n, g: c.create_partition(n, "winter"),
        lambda c, n, g: [c.has_partition(n, "winter"), sorted(c.list_partitions(n))],
        lambda c, n, g: c.insert(n, g.new(), partition_name="winter"),
        lambda c, n, g: c.load_partitions(n, ["winter"]),
        lambda c, n, g: c.search(
            n, data=[g.queries[0]], partition_names=["winter"], output_fields=["*"]
        ),
        lambda c, n, g: c.release_partitions(n, ["winter"]),
        lambda c, n, g: c.drop_partition(n, "winter"),
        lambda c, n, g: c.has_partition(n, "winter"),
    ],
    "aliases": [
        lambda c, n, g: c.create_alias(n, f"{n}_a"),
        lambda c, n, g: c.create_alias(n, f"{n}_a"),
        lambda c, n, g: c.search(f"{n}_a", data=[g.queries[0]], output_fields=["*"]),
        lambda c, n, g: c.get(f"{n}_a", g.keys(1)),
        lambda c, n, g: c.describe_index(f"{n}_a", "vector"),
        lambda c, n, g: c.describe_collection(f"{n}_a")["fields"],
        lambda c, n, g: [len(c.list_aliases(n)["aliases"]), sorted(c.describe_alias(f"{n}_a"))],
        lambda c, n, g: c.alter_alias(n, f"{n}_a"),
        lambda c, n, g: c.insert(f"{n}_a", g.new()),
        rows_there,
        lambda c, n, g: c.drop_alias(f"{n}_a"),
        lambda c, n, g: c.search(f"{n}_a", data=[g.queries[0]]),
        lambda c, n, g: c.alter_alias(n, f"{n}_b"),
        lambda c, n, g: c.describe_alias(f"{n}_a"),
    ],
    "a new name": [
        lambda c, n, g: c.rename_collection(n, f"{n}_renamed"),
        lambda c, n, g: c.search(n, data=[g.queries[0]]),
        lambda c, n, g: c.search(f"{n}_renamed", data=[g.queries[0]], output_fields=["*"]),
        lambda c, n, g: c.load_collection(f"{n}_renamed"),  # Milvus Lite releases what is renamed.
        lambda c, n, g: c.search(f"{n}_renamed", data=[g.queries[0]], output_fields=["*"]),
        lambda c, n, g: c.insert(f"{n}_renamed", g.new()),
        lambda c, n, g: c.rename_collection(f"{n}_renamed", n),
        lambda c, n, g: c.load_collection(n),
        rows_there,
    ],
    "out of memory and back": [
        lambda c, n, g: c.release_collection(n),
        lambda c, n, g: c.get_load_state(n),
        lambda c, n, g: c.search(n, data=[g.queries[0]]),
        lambda c, n, g: c.query(n, filter="group == 1"),
        lambda c, n, g: c.load_collection(n),
        lambda c, n, g: c.get_load_state(n),
        lambda c, n, g: c.search(n, data=[g.queries[0]], output_fields=["vector"]),
        lambda c, n, g: c.flush(n),
    ],
    "properties": [
        lambda c, n, g: c.alter_collection_properties(n, {"collection.ttl.seconds": 100_000}),
        lambda c, n, g: c.describe_collection(n)["properties"],
        lambda c, n, g: c.drop_collection_properties(n, ["collection.ttl.seconds"]),
        lambda c, n, g: c.search(n, data=[g.queries[0]]),
    ],
}

REFUSED_THERE = {
    "no question": lambda g: {"data": None},
    "data and ids": lambda g: {"ids": g.keys(3)},
    "no ids": lambda g: {"data": None, "ids": []},
    "a vector that is not in a list": lambda g: {"data": [0.1] * DIM},
    "an array of one vector": lambda g: {"data": g.queries[0]},
    "a number": lambda g: {"data": 3},
    "a tuple": lambda g: {"data": tuple(g.queries)},
    "a field that is not there": lambda g: {"anns_field": "nowhere"},
    "a field without vectors": lambda g: {"anns_field": "group"},
    "fields as a word": lambda g: {"output_fields": "vector"},
    "fields as numbers": lambda g: {"output_fields": [3]},
    "a filter that is none": lambda g: {"filter": "no such thing"},
    "a filter that is a number": lambda g: {"filter": 3},
    "a template that is not filled": lambda g: {"filter": "group < {n}", "filter_params": {"n": 2}},
    "a negative limit": lambda g: {"limit": -1},
    "a limit of 0": lambda g: {"limit": 0},
    "a limit as a word": lambda g: {"limit": "3"},
    "a limit between numbers": lambda g: {"limit": 3.5},
    "no limit": lambda g: {"limit": None},
    "a negative offset": lambda g: {"offset": -1},
    "an offset as a word": lambda g: {"offset": "3"},
    "an offset between numbers": lambda g: {"offset": 1.5},
    "two offsets": lambda g: {"offset": 2, "search_params": {"offset": 3}},
    "params as a list": lambda g: {"search_params": {"params": [3]}},
    "a partition that is not there": lambda g: {"partition_names": ["nowhere"]},
    "partitions as a word": lambda g: {"partition_names": "spring"},
    "a level that is none": lambda g: {"consistency_level": "Nope"},
    "too many decimals": lambda g: {"round_decimal": 10},
    "too few decimals": lambda g: {"round_decimal": -2},
    "decimals as a word": lambda g: {"round_decimal": "3"},
    "no decimals": lambda g: {"round_decimal": None},
}

REFUSED_FIRST = {
    "no data": lambda g: {"data": []},
    "another width": lambda g: {"data": [[0.1] * (DIM + 1)]},
    "the width of what is stored": lambda g: {"data": [[0.1] * STORED_WIDTH]},
    "widths of all kinds": lambda g: {"data": [[0.1] * DIM, [0.1] * 3]},
    "words": lambda g: {"data": ["words"]},
    "words in a vector": lambda g: {"data": [["a"] * DIM]},
    "nothing in a vector": lambda g: {"data": [[None] * DIM]},
    "a sparse vector": lambda g: {"data": [{1: 0.5}]},
    "a metric that is none": lambda g: {"search_params": {"metric_type": "NOPE"}},
    "a metric that is a number": lambda g: {"search_params": {"metric_type": 3}},
    "parameters as a word": lambda g: {"search_params": "nprobe"},
    "a bound that is no number": lambda g: {"search_params": {"params": {"radius": "x"}}},
}

REFUSED_HERE = {
    "nan": lambda g: {"data": [[float("nan")] * DIM]},
    "another metric": lambda g: {
        "search_params": {"metric_type": "L2" if g.metric != "L2" else "IP"}
    },
}

WRONG = {
    "get by a fraction": lambda c, n, g: c.get(n, 3.5),
    "get by nothing": lambda c, n, g: c.get(n, None),
    "get by a key of the other kind": lambda c, n, g: c.get(n, "word" if g.kind == "int" else 3),
    "query by ids and filter": lambda c, n, g: c.query(n, ids=g.keys(3), filter="group == 3"),
    "query by a filter that is none": lambda c, n, g: c.query(n, filter="no such thing"),
    "query by a number": lambda c, n, g: c.query(n, filter=3),
    "query fields as a word": lambda c, n, g: c.query(
        n, filter="price < 2", output_fields="vector"
    ),
    "query fields as numbers": lambda c, n, g: c.query(n, filter="price < 2", output_fields=[3]),
    "get fields as a word": lambda c, n, g: c.get(n, g.keys(3), output_fields="vector"),
    "query a negative number of rows": lambda c, n, g: c.query(n, filter="price < 2", limit=-1),
    "query too many rows": lambda c, n, g: c.query(n, filter="price < 2", limit=20_000),
    "query rows by a word": lambda c, n, g: c.query(n, filter="price < 2", limit="a"),
    "query no such partition": lambda c, n, g: c.query(
        n, filter="price < 2", partition_names=["nowhere"]
    ),
    "count with another field": lambda c, n, g: c.query(n, output_fields=["count(*)", "vector"]),
    "page fields as a word": lambda c, n, g: c.query_iterator(n, output_fields="vector").next(),
    "page hits with many decimals": lambda c, n, g: c.search_iterator(
        n, [g.queries[0]], round_decimal=10
    ),
    "query no such collection": lambda c, n, g: c.query("nowhere", filter="price < 2"),
    "get from no such collection": lambda c, n, g: c.get("nowhere", g.keys(3)),
    "search no such collection": lambda c, n, g: c.search("nowhere", data=[g.queries[0]]),
    "insert into no such collection": lambda c, n, g: c.insert("nowhere", g.new()),
    "upsert into no such collection": lambda c, n, g: c.upsert("nowhere", g.new()),
    "delete from no such collection": lambda c, n, g: c.delete("nowhere", g.keys(1)),
    "describe no such collection": lambda c, n, g: c.describe_collection("nowhere"),
    "describe nothing": lambda c, n, g: c.describe_collection(None),
    "drop no such partition": lambda c, n, g: c.drop_partition(n, "nowhere"),
    "delete by ids and filter": lambda c, n, g: c.delete(
        n, ids=g.keys(9_999), filter="group == 77"
    ),
    "delete by nothing": lambda c, n, g: c.delete(n),
    "delete by a fraction": lambda c, n, g: c.delete(n, ids=[3.5]),
    "delete by a filter that is none": lambda c, n, g: c.delete(n, filter="no such thing"),
    "delete by an empty filter": lambda c, n, g: c.delete(n, filter=""),
    "delete from no such partition": lambda c, n, g: c.delete(
        n, ids=g.keys(9_999), partition_name="nowhere"
    ),
    "insert into no such partition": lambda c, n, g: c.insert(n, g.new(), partition_name="nowhere"),
}

WRONG_ROWS = {
    "a tuple": lambda g: tuple(g.new()),
    "nothing": lambda g: None,
    "a word": lambda g: "rows",
    "words": lambda g: ["rows"],
    "no vector": lambda g: g.new_without("vector"),
    "one without a vector": lambda g: g.new_without("vector", group=2),
    "a word for a number": lambda g: g.new(group="word"),
    "a fraction for a number": lambda g: g.new(group=3.5),
    "a number for a word": lambda g: g.new(title=3),
    "a word that is too long": lambda g: g.new(title="x" * 99),
    "an array of words": lambda g: g.new(tags=["x"]),
    "nothing for a number": lambda g: g.new(group=None),
    "no number": lambda g: g.new_without("group"),
    "no key": lambda g: g.new_without(g.key_field),
    "keys of the other kind": lambda g: g.new(**{g.key_field: "x" if g.kind == "int" else 3}),
    "nothing for a key": lambda g: g.new(**{g.key_field: None}),
    "what json does not know": lambda g: g.new(document={1, 2}),
    "a dynamic field that json does not know": lambda g: g.new(note={1, 2}),
}

WRONG_VECTORS = {
    "nothing": None,
    "a number": 3,
    "a word": "word",
    "words": ["a"] * DIM,
    "another width": [0.1] * (DIM - 1),
    "the width of what is stored": [0.1] * STORED_WIDTH,
    "no numbers": [],
    "widths of all kinds": [[0.1], [0.1, 0.2]],
    "nothing in it": [None] * DIM,
}


class EveryCall:
    """The tests of a client. A subclass is in a module that has a `catalogue` of each kind."""

    @pytest.fixture
    def changing(self, catalogue):
        """The catalogue, rid afterwards of the rows that a test put into it. Milvus 2.3.5 may lose a row whose
        key was deleted a moment ago, so each test has keys of its own. A test that leaves it released fails: the
        others would compare nothing but refusals."""
        catalogue.first += 10
        yield catalogue
        for client, name in catalogue.sides:
            client.delete(name, filter=catalogue.is_new)
            assert client.get_load_state(name)["state"] == LoadState.Loaded

    @pytest.fixture
    def either(self, catalogue):
        """One catalogue of either kind of key, for what does not depend on the metric."""
        return catalogue

    @pytest.mark.parametrize("question", SEARCHES)
    def test_searches_cannot_be_told_apart(self, catalogue, question):
        if question == "sealed rows only" and not catalogue.backend.is_lite:
            pytest.skip("which rows are sealed is the server's affair")
        asked = {"data": list(catalogue.queries), **SEARCHES[question](catalogue)}
        expected, got = (client.search(name, **asked) for client, name in catalogue.sides)
        assert_same(catalogue, expected, got)

    @pytest.mark.parametrize("decimals", [0, 3])
    def test_scores_are_rounded_as_there(self, catalogue, decimals):
        """Milvus 2.3.5 rounds before it sorts, and so orders by key what is equal then."""
        asked = {"data": list(catalogue.queries), "limit": ITEMS, "round_decimal": decimals}
        expected, got = (client.search(name, **asked) for client, name in catalogue.sides)
        for a, b in zip(expected, got, strict=True):
            assert type(b.distances) is type(a.distances)
            assert b.distances == [hit["distance"] for hit in b]
            np.testing.assert_array_equal(b.distances, np.round(b.distances, decimals))
            step = 1.01 * 10.0**-decimals if catalogue.metric == "L2" else 0.0
            np.testing.assert_allclose(b.distances, a.distances, atol=step + ACCURACY)
            assert sorted(b.ids) == sorted(a.ids)

    def test_a_query_without_direction_finds_what_it_finds_there(self, catalogue):
        """All rows are as far from it under IP and COSINE, so that any may come."""
        expected, got = (
            client.search(name, data=[[0.0] * DIM]) for client, name in catalogue.sides
        )
        np.testing.assert_allclose(got[0].distances, expected[0].distances, atol=ACCURACY)

    def test_a_ring_is_drawn_around_each_of_several_queries(self, catalogue):
        """Under L2 the augmented form has another bound for each."""
        asked = {
            "data": list(catalogue.queries),
            "search_params": {"params": catalogue.ring()},
            "limit": 50,
        }
        expected, got = (outcome(lambda c=c, n=n: c.search(n, **asked)) for c, n in catalogue.sides)
        assert_same(catalogue, expected, got)

    @pytest.mark.parametrize("question", RANKED)
    def test_at_full_strength_every_search_ranks_by_the_corrected_score(self, catalogue, question):
        asked, passes = RANKED[question][0](catalogue), RANKED[question][1]
        found = catalogue.client.search(
            catalogue.corrected, data=list(catalogue.queries), strength=1, **asked
        )
        candidates = np.array([i for i in range(ITEMS) if passes(i)])
        first = asked.get("offset") or asked.get("search_params", {}).get("offset", 0)
        for hits, scores in zip(
            found, catalogue.scores(catalogue.queries, 1.0)[:, candidates], strict=True
        ):
            page = catalogue.best_first(scores)[first : first + asked.get("limit", 10)]
            assert hits.ids == catalogue.keys(*candidates[page].tolist())
            np.testing.assert_allclose(hits.distances, scores[page], atol=3 * ACCURACY)

    def test_at_full_strength_a_ring_is_one_of_corrected_scores(self, catalogue):
        for query in range(2):
            [hits] = catalogue.client.search(
                catalogue.corrected,
                data=[catalogue.queries[query]],
                search_params={"params": catalogue.ring(query, strength=1.0)},
                limit=100,
                strength=1,
            )
            [scores] = catalogue.scores(catalogue.queries[query : query + 1], 1.0)
            assert hits.ids == catalogue.keys(*catalogue.best_first(scores)[5:60].tolist())

    def test_at_full_strength_groups_are_led_by_their_best_corrected_row(self, catalogue):
        if not catalogue.backend.is_lite:
            pytest.skip("this server knows no groups")
        found = catalogue.client.search(
            catalogue.corrected, data=list(catalogue.queries), group_by_field="group", strength=1
        )
        for hits, scores in zip(found, catalogue.scores(catalogue.queries, 1.0), strict=True):
            leaders = {}
            for number in catalogue.best_first(scores).tolist():
                leaders.setdefault(number % 5, catalogue.key(number))
            assert hits.ids == list(leaders.values())

    def test_at_full_strength_rows_are_searched_by_their_keys(self, catalogue):
        found = catalogue.client.search(catalogue.corrected, ids=catalogue.keys(3, 170), strength=1)
        for hits, scores in zip(
            found, catalogue.scores(catalogue.items[[3, 170]], 1.0), strict=True
        ):
            assert hits.ids == catalogue.keys(*catalogue.best_first(scores)[:10].tolist())

    @pytest.mark.parametrize("read", READS)
    def test_what_is_read_cannot_be_told_apart(self, catalogue, read):
        expected, got = (READS[read](client, name, catalogue) for client, name in catalogue.sides)
        assert_same(catalogue, expected, got)

    @pytest.mark.parametrize("write", WRITES)
    def test_what_is_written_cannot_be_told_apart(self, changing, write):
        assert_lives_alike(changing, [*WRITES[write], rows_there])

    @pytest.mark.parametrize("write", PARTIAL)
    def test_partial_upserts_cannot_be_told_apart(self, changing, write):
        if not changing.backend.is_lite:
            pytest.skip("this server has no partial upsert")
        assert_lives_alike(changing, [*PARTIAL[write], rows_there])

    @pytest.mark.parametrize("life", LIVES)
    def test_collections_live_alike(self, changing, life):
        assert_lives_alike(changing, LIVES[life])

    def test_an_index_is_dropped_and_built_as_there(self, catalogue):
        assert_lives_alike(
            catalogue,
            [
                lambda c, n, g: c.create_index(
                    n, c.prepare_index_params("group", index_type="INVERTED")
                ),
                lambda c, n, g: sorted(c.list_indexes(n)),
                lambda c, n, g: c.release_collection(n),
                lambda c, n, g: c.drop_index(n, "group"),
                lambda c, n, g: c.drop_index(n, "vector"),
                lambda c, n, g: c.describe_index(n, "vector"),
                lambda c, n, g: c.create_index(
                    n, c.prepare_index_params("vector", index_type="FLAT", metric_type=g.metric)
                ),
                lambda c, n, g: c.describe_index(n, "vector"),
                lambda c, n, g: c.load_collection(n),
                lambda c, n, g: c.search(n, data=[g.queries[0]], output_fields=["vector"]),
            ],
        )

    def test_keys_that_the_database_cannot_make_are_refused_as_there(self, lite):
        """Milvus Lite makes numbers only."""
        bank = QueryBank(vectors(np.random.default_rng(62), 20, DIM))
        form = {"dimension": DIM, "id_type": "string", "max_length": 40, "auto_id": True}
        for client, further in (
            (lite.client(), {}),
            (lite.hubness_client(), {"hubness": CorrectionConfig(Recipe(bank, estimator=NNN(K)))}),
        ):
            name = lite.name("auto")
            with pytest.raises(MilvusException, match="must be INT64"):
                client.create_collection(name, **form, **further)
            assert not client.has_collection(name)

    def test_keys_are_made_by_the_database_as_there(self, lite):
        rng = np.random.default_rng(62)
        items, bank = vectors(rng, 20, DIM), QueryBank(vectors(rng, 20, DIM))
        form = {"dimension": DIM, "auto_id": True, "consistency_level": "Strong"}
        plain, client, sides = lite.client(), lite.hubness_client(strength=0), []
        for each, further in (
            (plain, {}),
            (client, {"hubness": CorrectionConfig(Recipe(bank, estimator=NNN(K)))}),
        ):
            name = lite.name("auto")
            each.create_collection(name, **form, **further)
            sides.append((each, name))
        told = [
            c.insert(n, [{"vector": row, "note": i} for i, row in enumerate(items)])
            for c, n in sides
        ]
        assert [type(each) for each in told] == [type(told[0])] * 2
        assert [(each.keys(), each["insert_count"], type(each["ids"])) for each in told] == [
            (told[0].keys(), 20, type(told[0]["ids"]))
        ] * 2
        found = [
            [
                [hit["entity"]["note"] for hit in hits]
                for hits in c.search(n, data=items[:3], output_fields=["note"])
            ]
            for c, n in sides
        ]
        assert found[1] == found[0]
        read = [c.get(n, each["ids"][4])[0] for (c, n), each in zip(sides, told, strict=True)]
        assert [row.keys() for row in read] == [read[0].keys()] * 2
        np.testing.assert_allclose(read[1]["vector"], items[4], rtol=2.4e-7)
        assert type(read[1]["id"]) is type(read[0]["id"])

    def test_databases_are_left_and_entered_as_there(self, catalogue):
        own = catalogue.backend.database
        other = f"{own}_elsewhere"

        def move(c, n, g):
            c.use_database(other)
            there = [
                c.list_collections(),
                outcome(c.search, n, [g.queries[0]]),
                outcome(c.get, n, g.keys(1)),
            ]
            c.use_database(own)
            return [*there, c.get(n, g.keys(1))]

        refused = outcome(catalogue.plain.create_database, other)
        try:
            assert_lives_alike(
                catalogue, [lambda c, n, g: c.use_database("nowhere"), *([] if refused else [move])]
            )
        finally:
            if not refused:
                catalogue.plain.drop_database(other)

    @pytest.mark.parametrize("question", REFUSED_THERE)
    def test_wrong_searches_raise_what_they_raise_there(self, either, question):
        asked = {"data": list(either.queries), **REFUSED_THERE[question](either)}
        expected, got = (outcome(lambda c=c, n=n: c.search(n, **asked)) for c, n in either.sides)
        if isinstance(expected, Exception):
            assert_refused_alike(either, expected, got)
        else:
            assert_same(either, expected, got)

    @pytest.mark.parametrize("question", REFUSED_FIRST)
    def test_wrong_vectors_and_metrics_are_caught_where_they_are_caught_there(
        self, either, question
    ):
        """The augmented form would take or misread them, so the client refuses before the database does."""
        asked = {"data": [either.queries[0]], **REFUSED_FIRST[question](either)}
        expected, got = (outcome(lambda c=c, n=n: c.search(n, **asked)) for c, n in either.sides)
        for refusal in (expected, got):
            assert isinstance(refusal, MilvusException)
        assert str(STORED_WIDTH) not in str(got) or question == "the width of what is stored"

    @pytest.mark.parametrize("call", WRONG)
    def test_wrong_calls_raise_what_they_raise_there(self, either, call):
        expected, got = (
            outcome(WRONG[call], client, name, either) for client, name in either.sides
        )
        assert_same(either, expected, got)

    @pytest.mark.parametrize("method", ["insert", "upsert"])
    @pytest.mark.parametrize("rows", WRONG_ROWS)
    def test_wrong_rows_raise_what_they_raise_there(self, either, changing, method, rows):
        data = WRONG_ROWS[rows](changing)
        assert_lives_alike(changing, [lambda c, n, g: getattr(c, method)(n, data), rows_there])

    @pytest.mark.parametrize("method", ["insert", "upsert"])
    def test_wrong_vectors_in_rows_are_caught_where_they_are_caught_there(
        self, either, changing, method
    ):
        for vector in WRONG_VECTORS.values():
            for client, name in changing.sides:
                with pytest.raises(MilvusException):
                    getattr(client, method)(name, changing.new(vector=vector))
        assert not rows_there(changing.client, changing.corrected, changing)
