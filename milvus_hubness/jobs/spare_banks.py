"""Generations of banks that no biases come from: noted before they are made or left, dropped afterwards.

Whoever is killed in between leaves a note, and the next refresh of the collection drops what it names, unless
some collection's biases come from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

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
        told = [*self._noted(), *banks]
        if told:
            body = json.dumps([each.model_dump() for each in told])
            self._store.put_records(LEDGER, [Record(self._key, SPARE_BANKS, body)])

    def drop(self, check: Callable[[], object] = lambda: None) -> None:
        """Those of them that are of no use now. check: called before anything is written."""
        if not (noted := self._noted()):
            return
        check()
        for bank in noted:
            if self._store.exists(bank.collection):
                self._store.drop_bank_generation(bank)
        self._store.drop_records(LEDGER, SPARE_BANKS, [self._key])

    def _noted(self) -> list[BankReference]:
        record = self._store.record(LEDGER, self._key)
        return [BankReference.model_validate(each) for each in json.loads(record.body)] if record else []
