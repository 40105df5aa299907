"""Quickstart: correct a plain collection, and compare recall before and after.

pip install ".[jobs,lite]"  # in a clone: nothing is on PyPI yet
python quickstart.py [FILE.db or http://HOST:PORT]
"""

import sys
import tempfile

from pymilvus import MilvusClient

from milvus_hubness import Copy, HubnessClient, migrate, plan_correction
from milvus_hubness.demo.run import build, collect


def recall(client, collection, queries, limit):
    """Return the percentage of queries whose right answer is among the first `limit`; row i answers query i."""
    results = client.search(collection, data=list(queries), limit=limit)
    return (
        100 * sum(i in [hit["id"] for hit in hits] for i, hits in enumerate(results)) / len(queries)
    )


def run(uri):
    # Vectors of functions of Python's standard library, and of the docstrings that ask for them. The bank holds
    # docstrings of other functions; in your application it holds vectors of past queries.
    data = build(collect())
    print(
        f"{len(data.gallery):,} functions, {len(data.queries):,} queries, {len(data.bank):,} in the bank"
    )

    # A plain collection, as you have one.
    plain = MilvusClient(uri)
    plain.create_collection(
        "functions", dimension=256, metric_type="COSINE", consistency_level="Strong"
    )
    functions = zip(data.gallery, data.names, strict=True)
    plain.insert(
        "functions",
        [{"id": i, "vector": vector, "name": name} for i, (vector, name) in enumerate(functions)],
    )
    before = [recall(plain, "functions", data.queries, limit) for limit in (1, 10)]

    # Copy it into its corrected form; the name "live" leads to the copy once it is verified.
    plan = plan_correction(plain, "functions", data.bank, Copy(alias="live"))
    migrate(plain, plan, no_writers=True)

    # HubnessClient has the methods of MilvusClient: in the application only the name of the class changes.
    client = HubnessClient(uri)
    after = [recall(client, "live", data.queries, limit) for limit in (1, 10)]
    for name, plain_recall, corrected_recall in zip(
        ("recall@1", "recall@10"), before, after, strict=True
    ):
        print(f"{name:9}  {plain_recall:.1f}% plain, {corrected_recall:.1f}% corrected")
    return before, after


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run(sys.argv[1] if len(sys.argv) > 1 else f"{folder}/quickstart.db")
