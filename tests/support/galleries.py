"""Collections with everything in them, and the float64 oracle of the corrected score."""

import numpy as np
from pymilvus import DataType

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.codec.base import NORM_FIELD, VectorCodec
from milvus_hubness.jobs.common.progress import key_pages

METRICS = ["IP", "COSINE", "L2"]


def vectors(rng, count, dim, metric="IP"):
    """A gallery with hubs in it: a few rows lie near the common direction."""
    shared = rng.normal(size=dim)
    rows = rng.normal(size=(count, dim)) + np.outer(rng.gamma(1.0, 0.6, count), shared)
    return (rows / np.sqrt(dim)).astype(np.float32)


def hubby_gallery(rows=400, queries=600, dim=48):
    """Items (rows, dim), of which those far along a drift are hubs; queries near items, and the item of each."""
    rng = np.random.default_rng(0)
    drift = rng.standard_normal(dim)
    far = rng.gamma(1, 0.2, rows)
    items = rng.standard_normal((rows, dim)) + np.outer(far, drift)
    answers = rng.integers(0, rows, queries)
    asked = items[answers] + 0.7 * rng.standard_normal((queries, dim)) + 0.5 * drift
    return items.astype(np.float32), asked.astype(np.float32), answers


def single_queries(rows):
    """A bank whose queries each stand for themselves, as the oracle has it: none are near copies."""
    return QueryBank(rows, groups=np.arange(len(rows)))


def similarity(queries, items, metric):
    """(m, n) in float64: q·r, cosine, or −½‖q−r‖²."""
    q, r = queries.astype(float), items.astype(float)
    if metric == "IP":
        return q @ r.T
    if metric == "COSINE":
        return (q @ r.T) / np.outer(np.linalg.norm(q, axis=1), np.linalg.norm(r, axis=1))
    return -0.5 * ((q[:, None] - r[None]) ** 2).sum(-1)


def products_of(queries, items, metric):
    """As `similarity`, without an array of all differences under L2."""
    queries, items = queries.astype(float), items.astype(float)
    if metric == "COSINE":
        queries, items = (
            rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (queries, items)
        )
    products = queries @ items.T
    if metric != "L2":
        return products
    return products - 0.5 * (items**2).sum(axis=1) - 0.5 * (queries**2).sum(axis=1)[:, None]


def embedding_like(dim, metric, count=1_000):
    """Items, queries and biases of sd near 0.05 of the squared length, as those of text embeddings.

    Lengths vary unless the metric is COSINE.
    """
    rng = np.random.default_rng(dim)
    # Few directions carry the content, as in an embedding.
    basis = rng.normal(size=(24, dim)) / np.sqrt(24 * dim)
    common = rng.normal(size=24)
    drawn = [
        rng.normal(size=(n, 24)) + 0.7 * np.outer(rng.gamma(1.0, 1.0, n), common)
        for n in (count, 80, 200)
    ]
    items, queries, bank = (content @ basis for content in drawn)
    items, queries, bank = (
        rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (items, queries, bank)
    )
    if metric != "COSINE":
        items *= np.exp(0.1 * rng.normal(size=count))[:, None]
    biases = np.sort(products_of(bank, items, metric), axis=0)[-16:].mean(axis=0)
    biases *= 0.05 / biases.std()
    return (
        items.astype(np.float32),
        queries.astype(np.float32),
        (biases - biases.mean()).astype(np.float32),
    )


def nnn(bank, items, metric, k, alpha, groups=None):
    """(n,) float64 biases straight from the definition.

    groups: of near copies, by query; all of a group together count as one query with their mean score.
    """
    scores = similarity(bank, items, metric)
    if groups is not None:
        scores = np.stack([scores[groups == group].mean(axis=0) for group in np.unique(groups)])
    return alpha * np.sort(scores, axis=0)[-k:].mean(axis=0)


def crowding(bank, gallery, share):
    """The share of the bank whose nearest items are the fewest."""
    nearest = (bank @ gallery.T).argmax(1)
    counts = np.bincount(nearest, minlength=len(gallery))
    order = np.lexsort((nearest, -counts[nearest]))
    return bank[order[: int(share * len(bank))]]


def half_known():
    """A bank (300, 16), items (200, 16), and a query for each item, float32.

    The bank asks for items of the first half only, whose queries are all drawn along axis 0: some
    items there are hubs.
    For the second half, axis 0 is content, and the bank's biases are wrong.
    """
    rng = np.random.default_rng(0)
    items = rng.standard_normal((200, 16))
    items[:100, 2] += 2
    items[100:, 2] -= 2
    items[:100, 0] = 2 * rng.gamma(1, 1, 100)
    items[100:, 0] = rng.permutation(np.linspace(-3, 3, 100))

    def ask(which):
        queries = items[which] + rng.standard_normal((len(which), 16))
        queries[which < 100, 0] = 2
        return queries.astype(np.float32)

    queries = ask(np.arange(200))
    return ask(np.repeat(np.arange(100), 3)), items.astype(np.float32), queries


def as_distance(scores, metric):
    """Similarities as Milvus reports them."""
    return -2 * scores if metric == "L2" else scores


def vector_codec(layout, dtype="float32"):
    """The codec of a field that holds the augmented vectors."""
    return VectorCodec("vector", "", layout, dtype, 0)


def decoded(layout, stored, norms=None, dtype="float32"):
    """The vectors in stored rows."""
    return vector_codec(layout, dtype).decode_rows({"vector": stored, NORM_FIELD: norms})


def rich_schema(client, key="int", dim=32):
    """Every kind of field that both backends hold."""
    schema = client.create_schema(enable_dynamic_field=True)
    if key == "int":
        schema.add_field("pk", DataType.INT64, is_primary=True)
    else:
        schema.add_field("pk", DataType.VARCHAR, max_length=200, is_primary=True)
    schema.add_field("vec", DataType.FLOAT_VECTOR, dim=dim)
    schema.add_field("tenant", DataType.VARCHAR, max_length=40, is_partition_key=True)
    schema.add_field("document", DataType.JSON)
    schema.add_field("numbers", DataType.ARRAY, element_type=DataType.INT64, max_capacity=8)
    schema.add_field(
        "words", DataType.ARRAY, element_type=DataType.VARCHAR, max_capacity=8, max_length=40
    )
    schema.add_field("flag", DataType.BOOL)
    schema.add_field("small", DataType.INT8)
    schema.add_field("medium", DataType.INT16)
    schema.add_field("count", DataType.INT32)
    schema.add_field("big", DataType.INT64)
    schema.add_field("single", DataType.FLOAT)
    schema.add_field("double", DataType.DOUBLE)
    return schema


AWKWARD = [
    "o'hara",
    'say "hi"',
    "back\\slash",
    "tab\there",
    "line\nbreak",
    "é😀",
    "%s {x}",
    "\x01",
    "",
]


def rich_rows(rng, count, key="int", dim=32):
    items = vectors(rng, count, dim)
    return [
        {
            "pk": i * 3 - 7 if key == "int" else AWKWARD[i] if i < len(AWKWARD) else f"key-{i:06d}",
            "vec": items[i],
            "tenant": f"tenant {i % 7}",
            "document": {"n": i, "deep": {"list": [1, None, {"x": i / 3}]}, "text": AWKWARD[i % 9]},
            "numbers": list(range(i % 5)),
            "words": [AWKWARD[i % 9]] * (i % 3),
            "flag": i % 2 == 0,
            "small": i % 127,
            "medium": -i % 32_000,
            "count": i * 1_000,
            "big": (1 << 60) + i,
            "single": i / 7,
            "double": i / 7,
            "free": {"any": i},
            **({"sometimes": "there"} if i % 4 == 0 else {}),
        }
        for i in range(count)
    ]


def plain_collection(
    client,
    name,
    items,
    metric,
    *,
    index_type="FLAT",
    params=None,
    fields=(),
    values=None,
    **options,
):
    """A loaded collection: id, vector, group (INT64), filled and strongly consistent.

    fields: (name, type, options) of further fields. values: of further fields, in every row.
    options: further ones of `create_collection`.
    """
    schema = client.create_schema(enable_dynamic_field=True)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=items.shape[1])
    schema.add_field("group", DataType.INT64)
    for field, data_type, options in fields:
        schema.add_field(field, data_type, **options)

    index = client.prepare_index_params(
        "vector", index_type=index_type, metric_type=metric, params=params or {}
    )
    client.create_collection(
        name, schema=schema, index_params=index, consistency_level="Strong", **options
    )

    rows = [
        {"id": i, "vector": vector, "group": i % 5, "note": f"n{i}", **(values or {})}
        for i, vector in enumerate(items)
    ]
    for start in range(0, len(rows), 1_000):
        client.insert(name, rows[start : start + 1_000])
    return rows


def not_called(*arguments, **options):
    """Take the place of a function that must not be called."""
    raise AssertionError(f"called with {arguments}, {options}")


def all_keys(store, collection, partition=None):
    """The keys of a partition, or of all partitions, in ascending order in each."""
    partitions = [partition] if partition else store.info(collection, counted=False).partitions
    return [
        key for name in partitions for page in key_pages(store, collection, name) for key in page
    ]
