"""Migrations in a ledger, without which no client writes to a copy."""

import json
from types import SimpleNamespace

from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.records import Record

MIGRATION = "m1"
"""The id of a migration, which the state of its copy carries."""


class MigrationsOnly:
    """As much of a store as a client asks before it writes to a copy: the migration of `source` to `target`."""

    def __init__(self, source, target, phase="switched"):
        self.target = target
        record = {
            "id": MIGRATION,
            "source": source,
            "target": target,
            "field": "vector",
            "phase": phase,
            "switch": None,
        }
        self.body = json.dumps(record)

    def record(self, ledger, key):
        return SimpleNamespace(body=self.body) if key == self.target else None


def let_write(store, source, target):
    """Write a migration to the ledger, by which writes to `source` may go to `target` as well."""
    migration = MigrationsOnly(source, target)
    store.put_records(LEDGER, [Record(target, "migrations of a test", migration.body)])
