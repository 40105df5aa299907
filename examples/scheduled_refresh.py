"""A refresh that a scheduler calls, such as cron or a Kubernetes CronJob.

pip install ".[jobs,lite]"  # in a clone: nothing is on PyPI yet
python scheduled_refresh.py                                        # on a collection of its own
python scheduled_refresh.py http://HOST:PORT products              # in a scheduler, with $MILVUS_HUBNESS_TOKEN
python scheduled_refresh.py http://HOST:PORT products queries.npy  # the same, with newer queries

Biases beside the vectors: rows without one get theirs, or all rows those of newer queries. Biases in the vectors:
`products` is an alias, and newer queries make a copy to which it moves.
"""

import json
import os
import sys
import tempfile

import numpy as np

from milvus_hubness import (
    Beside,
    HubnessClient,
    Recipe,
    connect,
    enable,
    errors,
    plan_correction,
    refresh,
    status,
)


def refresh_once(uri, collection, bank=None):
    """Refresh once, print one line of JSON, and return the exit code. If it is killed, the next call continues it."""
    try:
        client = connect(uri, os.environ.get("MILVUS_HUBNESS_TOKEN", ""))
        result = refresh(client, collection, bank)
    except errors.LeaseHeld as error:  # another process refreshes the collection
        print(json.dumps({"collection": collection, "action": "none", "reason": str(error)}))
        return 0
    except errors.HubnessError as error:
        print(json.dumps({"collection": collection, "error": str(error)}))
        return 1
    facts = {
        name: getattr(result, name)
        for name in ("collection", "action", "reason", "rows", "pending", "written")
    }
    print(json.dumps(facts))
    return (
        3 if result.action == "refused" else 0
    )  # new biases that are worse than the old ones are not used


def run(uri):
    rng = np.random.default_rng(0)
    client = HubnessClient(uri)
    client.create_collection("products", 32, metric_type="COSINE", consistency_level="Strong")
    rows = [{"id": i, "vector": vector} for i, vector in enumerate(rng.normal(size=(540, 32)))]
    client.insert("products", rows[:500])
    plan = plan_correction(
        client, "products", Recipe(rng.normal(size=(200, 32)), verdict="skip"), Beside()
    )
    enable(client, plan, client_ttl=0)
    client.insert(
        "products", rows[500:], bias="pending"
    )  # faster: leaves the biases to the next refresh

    before = status(client, "products").pending
    code = refresh_once(uri, "products")
    after = status(client, "products").pending
    print(f"{before} rows waited for a bias, {after} wait now")
    return code, before, after


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(refresh_once(*sys.argv[1:]))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run(f"{folder}/products.db")[0])
