"""Generations of banks that no biases come from: noted before they are made or left, dropped afterwards.

Whoever is killed in between leaves a note, and the next refresh of the collection drops what it names, unless
some collection's biases come from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from milvus_hubness.jobs.runner import LEDGER
from milvus_hubness.state import BankReference
from milvus_hubness.stores.base import Record, Store

SPARE_BANKS = "spare banks"


class SpareBanks:
    """Those of one collection."""

    def __init__(self, store: Store, collection: str) -> None:
        self._store, self._key = store, f"{SPARE_BANKS}/{collection}"

    def note(self, banks: Iterable[BankReference]) -> None:
        """That these may be of no use soon, beside those noted before."""
        told = [*self.noted(), *banks]
        if told:
            body = json.dumps([each.model_dump() for each in told])
            self._store.put_records(LEDGER, [Record(self._key, SPARE_BANKS, body)])

    def noted(self) -> list[BankReference]:
        """What was noted and not dropped since."""
        record = self._store.record(LEDGER, self._key)
        return [BankReference.model_validate(each) for each in json.loads(record.body)] if record else []

    def drop(self, noted: Sequence[BankReference]) -> None:
        """Those of what was noted that are of no use now. noted: all of it."""
        if not noted:
            return
        for bank in noted:
            if self._store.exists(bank.collection):
                self._store.drop_bank_generation(bank)
        self._store.drop_records(LEDGER, SPARE_BANKS, [self._key])
