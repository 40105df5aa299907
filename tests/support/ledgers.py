"""Migrations in a ledger, without which no client writes to a copy."""

import json
from types import SimpleNamespace

from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.records import Record


class MigrationsOnly:
    """As much of a store as a client asks before it writes to a copy: the migration of `source` to `target`."""

    def __init__(self, source, target, phase="switched"):
        self.body = json.dumps({"source": source, "target": target, "phase": phase, "switch": None})
        self.target = target

    def record(self, ledger, key):
        return SimpleNamespace(body=self.body) if key == self.target else None


def let_write(store, source, target):
    """Write a migration to the ledger, by which writes to `source` may go to `target` as well."""
    migration = MigrationsOnly(source, target)
    store.put_records(LEDGER, [Record(target, "migrations of a test", migration.body)])
