"""Migrate a collection from Python: a plan, a line for each event, a limited pace, cutover and rollback.

pip install ".[jobs,lite]"  # in a clone: nothing is on PyPI yet
python migrate_with_progress.py [FILE.db or http://HOST:PORT]
"""

import sys
import tempfile

import numpy as np

from milvus_hubness import (
    Copy,
    HubnessClient,
    QueryBank,
    Recipe,
    connect,
    migrate,
    plan_correction,
    rollback,
)
from milvus_hubness.jobs.common.progress import Events, Throttle

ROWS, DIM = 3000, 64


def show(event):
    """Print an event; docs/how-to/control.md lists all events and their facts."""
    facts = event.facts
    if event.name == "copying":
        print(
            f"  copied {facts['rows']:,} of {facts['rows_total']:,} rows, {facts['eta_seconds'] or 0:.0f} s left"
        )
    elif event.name == "catching-up":
        print(f"  compared {facts['rows']:,} rows, {facts['differing']} differ")
    elif event.name == "verified":
        print(f"  verified {facts['rows']:,} rows, {facts['fields']:,} field values are equal")
    elif event.name in ("after-cutover", "after-rollback", "warning", "failed"):
        print(f"  {event.name}: {', '.join(f'{name} {value}' for name, value in facts.items())}")


def run(uri):
    # A plain collection, which an application reads by its alias "live".
    rng = np.random.default_rng(0)
    plain = connect(uri, create=True)
    plain.create_collection(
        "products", dimension=DIM, metric_type="COSINE", consistency_level="Strong"
    )
    vectors = rng.normal(size=(ROWS, DIM))
    plain.insert(
        "products",
        [{"id": i, "vector": vector, "price": i % 90} for i, vector in enumerate(vectors)],
    )
    plain.create_alias("products", "live")

    # The plan only reads. `migrate` with the same plan also continues an interrupted run.
    bank = QueryBank(rng.normal(size=(1000, DIM)), source="past queries")
    # These vectors are random, and a verdict would advise against it: leave verdict out with your own.
    plan = plan_correction(plain, "products", Recipe(bank, verdict="skip"), Copy(alias="live"))
    print(
        "{source} -> {target}: {rows:,} rows, vectors of {dim} -> {width} numbers".format(
            **plan.to_dict()
        )
    )
    migrate(
        plain,
        plan,
        events=Events([show]),
        throttle=Throttle(rows_per_second=20_000),
        no_writers=True,
    )

    client = HubnessClient(uri)
    rows = [
        client.query(name, output_fields=["count(*)"])[0]["count(*)"]
        for name in ("products", "live")
    ]
    print(f"products has {rows[0]:,} rows; live, which is now {plan.body.target}, has {rows[1]:,}")
    back = rollback(plain, "live")
    print(
        f"rolled back: live is {back.source} again, {back.carried} rows written meanwhile were carried back"
    )
    return rows


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run(sys.argv[1] if len(sys.argv) > 1 else f"{folder}/products.db")
