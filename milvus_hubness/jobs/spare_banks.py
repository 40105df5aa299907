"""Spare bank generations: noted before a job saves or leaves them, dropped once no state names them.

A job that is killed in between leaves its note, and the next refresh of the collection drops what it names. A
job drops only generations that its own collection noted and that no collection state names; the store gives
back the rows of one that another job names at the same time, see Store.drop_bank_generation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from milvus_hubness.operations.owner import LEDGER
from milvus_hubness.state import BankReference
from milvus_hubness.stores.base import Record, Store

SPARE_BANKS = "spare banks"


class SpareBanks:
    """The spare bank generations of one collection."""

    def __init__(self, store: Store, collection: str) -> None:
        self._store, self._key = store, f"{SPARE_BANKS}/{collection}"

    def note(self, banks: Iterable[BankReference]) -> None:
        """Add these to the note."""
        spare = list(dict.fromkeys([*self.noted(), *banks]))
        if spare:
            body = json.dumps([bank.model_dump() for bank in spare])
            self._store.put_records(LEDGER, [Record(self._key, SPARE_BANKS, body)])

    def noted(self) -> list[BankReference]:
        """Return what was noted and not dropped since."""
        record = self._store.record(LEDGER, self._key)
        return [BankReference.model_validate(bank) for bank in json.loads(record.body)] if record else []

    def drop(self, noted: Sequence[BankReference]) -> None:
        """Drop those that no collection state names, and the note. noted: all of it."""
        if not noted:
            return
        for bank in noted:
            if self._store.exists(bank.collection):
                self._store.drop_bank_generation(bank)
        self._store.drop_records(LEDGER, SPARE_BANKS, [self._key])
