"""Makes every call of a client and prints the answers as JSON: run by test_base_install in other environments."""

import asyncio
import json
import sys

import numpy as np
from pymilvus import AnnSearchRequest, RRFRanker

from milvus_hubness import AsyncHubnessClient, CorrectionConfig, GloballyCorrected, HubnessClient

NOT_IN_THE_BASE = ("torch", "sklearn", "pyarrow", "faiss", "scipy", "tenacity")


def hits(results):
    return [[[hit["id"], hit["distance"]] for hit in found] for found in results]


async def searched_async(uri, queries):
    client = AsyncHubnessClient(uri)
    try:
        return hits(await client.search("gated", data=queries, limit=5))
    finally:
        await client.close()


def answers(uri):
    rng = np.random.default_rng(2)
    queries = list(rng.normal(size=(6, 16)).astype(np.float32))
    client = HubnessClient(uri)

    def written(name):
        """The answers and the biases after an insert and an upsert."""
        new = [
            {"id": 1000 + i, "vector": 2 * query, "text": query, "group": 7}
            for i, query in enumerate(queries[:4])
        ]
        client.insert(name, new[:2])
        client.upsert(name, [*new[2:], {**new[0], "vector": queries[5]}])
        return hits(client.search(name, data=queries, limit=5))

    requests = [
        AnnSearchRequest([queries[i]], field, {}, limit=5)
        for i, field in enumerate(("vector", "text"))
    ]
    config = CorrectionConfig(rng.normal(size=(20, 16)).astype(np.float32))
    client.create_collection(
        "created", dimension=16, auto_id=False, consistency_level="Strong", hubness=config
    )
    return {
        "search": hits(client.search("migrated", data=queries, limit=5)),
        "raw": hits(client.search("migrated", data=queries, limit=5, strength=0)),
        "hybrid": hits(client.hybrid_search("migrated", requests, RRFRanker(), limit=5)),
        "async": asyncio.run(searched_async(uri, queries)),
        "gate": hits(client.search("gated", data=queries, limit=5)),
        "candidates": hits(client.search("enabled", data=queries, limit=5)),
        "globally corrected": hits(
            client.search("migrated", data=queries, limit=5, rerank=GloballyCorrected(20))
        ),
        "written": {name: written(name) for name in ("migrated", "gated", "enabled", "created")},
        "biases": client.query("migrated", filter="id >= 1000", output_fields=["hubness_bias"]),
        "query": client.query("migrated", ids=[3, 1000], output_fields=["vector", "group"]),
    }


if __name__ == "__main__":
    found = answers(sys.argv[1])
    loaded = [name for name in NOT_IN_THE_BASE if name in sys.modules]
    print(json.dumps({"answers": found, "loaded": loaded}, default=float))  # noqa: T201
