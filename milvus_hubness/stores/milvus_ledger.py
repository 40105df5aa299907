"""Ledgers as Milvus collections: small entries of JSON, written and read strongly consistent."""

from __future__ import annotations

from collections.abc import Sequence

from pymilvus import DataType, MilvusClient

from milvus_hubness.errors import CollectionExists
from milvus_hubness.stores.base import Record
from milvus_hubness.stores.milvus_banks import MilvusBanks
from milvus_hubness.stores.milvus_rpc import is_one_of, literal, translated

LEDGER_PROPERTY = "hubness_ledger"
MAX_BODY = 60_000
_RECORDS_PER_REQUEST = 500
_FEW = 64
"""Records that one request reads."""


class MilvusLedger(MilvusBanks):
    """The ledger methods of the store. Every Milvus collection must have a vector field, so these do too."""

    def put_records(self, ledger: str, records: Sequence[Record]) -> None:
        self._ensure_ledger(ledger)
        rows = [
            {"key": each.key, "belongs_to": each.group, "body": each.body, "vector": [0.0, 0.0]}
            for each in records
        ]
        for start in range(0, len(rows), _RECORDS_PER_REQUEST):
            self._upsert(ledger, rows[start : start + _RECORDS_PER_REQUEST])

    def record(self, ledger: str, key: str) -> Record | None:
        if ledger not in self._ready_ledgers and not self.exists(ledger):
            return None
        self._ensure_ledger(ledger)
        found = self.get(ledger, [key], "vector").rows
        return Record(found[0]["key"], found[0]["belongs_to"], found[0]["body"]) if found else None

    def records(self, ledger: str, group: str) -> list[Record]:
        if not self.exists(ledger):
            return []
        self._ensure_ledger(ledger)
        where = f"belongs_to == {literal(group)}"
        with translated(ledger):
            few = self.client.query(
                ledger, where, ["key", "belongs_to", "body"], limit=_FEW, consistency_level="Strong"
            )
        if len(few) < _FEW:
            rows = sorted(few, key=lambda row: str(row["key"]))
            return [Record(row["key"], row["belongs_to"], row["body"]) for row in rows]
        keys = self._keys(ledger, where)
        found: list[Record] = []
        for start in range(0, len(keys), _RECORDS_PER_REQUEST):
            batch = self.get(ledger, keys[start : start + _RECORDS_PER_REQUEST], "vector")
            found += [Record(row["key"], row["belongs_to"], row["body"]) for row in batch.rows]
        return found

    def drop_records(self, ledger: str, group: str, keys: Sequence[str] | None = None) -> None:
        if not self.exists(ledger):
            return
        self._ensure_ledger(ledger)
        # By keys alone: by any other field, Milvus searches for the rows first.
        chosen = f"belongs_to == {literal(group)}" if keys is None else is_one_of("key", keys)
        with translated(ledger):
            self._delete(ledger, chosen)

    def _ensure_ledger(self, ledger: str) -> None:
        """There, indexed and loaded, whatever an interrupted call left."""
        if ledger in self._ready_ledgers:
            return
        with translated(ledger):
            if not self.client.has_collection(ledger):
                schema = MilvusClient.create_schema(description="ledger of milvus_hubness")
                schema.add_field("key", DataType.VARCHAR, is_primary=True, max_length=1_024)
                schema.add_field("belongs_to", DataType.VARCHAR, max_length=512)
                schema.add_field("body", DataType.VARCHAR, max_length=65_535)
                schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)
                properties = {LEDGER_PROPERTY: "1"}
                self.client.create_collection(
                    ledger, schema=schema, properties=properties, consistency_level="Strong"
                )
            elif LEDGER_PROPERTY not in self.client.describe_collection(ledger)["properties"]:
                raise CollectionExists(f"{ledger!r} is there already and is no ledger: rename it first")
            self._serve_flat(ledger, "IP")
        self._ready_ledgers.add(ledger)
