"""The scan of a collection for rows that look like planted hubs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from milvus_hubness.basics.defaults import ALERT_BUDGET
from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.correction.banks.bank import BankLike, optional_bank
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.codec.arrays import Floats
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.jobs.common.corrections import load_correction
from milvus_hubness.jobs.store.protocols import Store, expect_store
from milvus_hubness.quality.measures import as_plain
from milvus_hubness.quality.suspicion import Suspicions, expect_budget, scan
from milvus_hubness.reports.biased import BiasedGallery, read_biased

LISTED = 50
"""Rows with evidence, unless a caller wants another number."""


@dataclass(frozen=True)
class HubScan(ShownAsTable):
    """The result of a scan."""

    collection: str
    alert_budget: float
    keys: tuple[Key, ...]
    """The keys of the rows, by their positions in `found`."""
    found: Suspicions
    invalid: int
    """Rows that have no usable vector: zero under COSINE, or not finite."""

    @property
    def suspicious(self) -> list[Key]:
        """The keys of the suspicious rows, most suspicious first."""
        return [self.keys[row] for row in self.found.suspicious]

    @property
    def is_above_budget(self) -> bool:
        return self.found.exceeds(self.alert_budget)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for people and for --json."""
        evidence = [
            {"key": self.keys[row.row], **{k: v for k, v in row._asdict().items() if k != "row"}}
            for row in self.found.listed
        ]
        plain: dict[str, Any] = as_plain(
            {
                "collection": self.collection,
                "rows": self.found.rows,
                "suspicious": len(self.found.suspicious),
                "suspicious_share": self.found.share,
                "alert_budget": self.alert_budget,
                "above_budget": self.is_above_budget,
                "limit": self.found.limit,
                "listed": evidence,
                "zero_vectors": [self.keys[row] for row in self.found.zero_vectors],
                "invalid_vectors": self.invalid,
                "repeated_vectors": [
                    {"rows": len(group), "first_key": self.keys[group[0]]}
                    for group in self.found.repeated
                ],
            }
        )
        return plain


def scan_hubs(
    store: Store,
    collection: str,
    bank: BankLike | None = None,
    *,
    alert_budget: float = ALERT_BUDGET,
    field: str | None = None,
    top: int = LISTED,
    progress: Progress = silent,
) -> HubScan:
    """Scan all rows of a collection, corrected or not, for planted hubs. Read only.

    bank: reference queries, which a collection that is not corrected needs. alert_budget: the share
    of rows that may be suspicious without an alarm. top: how many rows are listed with evidence, as
    well as all suspicious ones. Raises InvalidInput, InvalidParameter, EmptyCollection.
    """
    expect_store(store)
    alert_budget = expect_budget(alert_budget)
    biased = read_biased(store, collection, optional_bank(bank), field=field, progress=progress)
    gallery = biased.gallery
    state = biased.info.state_of(field)
    queries = biased.bank.condensed.vectors
    items = gallery.layout.reduce_items(gallery.vectors)
    if biased.kinds is not None:
        # Items of the kind that queries prefer are no hubs for that.
        queries = biased.kinds.centred_queries(queries)
        items = biased.kinds.centred_items(items)
    found = scan(
        queries,
        items,
        biases=biased.biases,
        by_guard=_by_guard(store, biased, state),
        lengths=np.linalg.norm(gallery.vectors, axis=1),
        top=top,
    )
    return HubScan(
        collection=biased.info.name,
        alert_budget=alert_budget,
        keys=tuple(gallery.keys),
        found=found,
        invalid=max(0, biased.info.rows - len(gallery.keys)),
    )


def _by_guard(store: Store, biased: BiasedGallery, state: CollectionState | None) -> Floats | None:
    """Return the reach of each row at the fit as a multiple of the limit of the guard.

    Rows that were planted after the fit cannot hide behind each other there. None if the gallery was
    not measured at the fit.
    """
    if state is None or state.profile.evidence is None or not state.profile.evidence.reaches:
        return None
    limit = state.profile.evidence.limit
    numbers = None if biased.kinds is None else biased.kinds.numbers
    correction = load_correction(store, state, state.profile)
    reaches = correction.reaches(biased.gallery.vectors, numbers)
    if reaches is None or limit <= 0:
        return None
    return reaches / np.float32(limit)
