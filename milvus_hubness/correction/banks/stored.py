"""Banks together with what an estimator has computed for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.codec.arrays import Floats

Key = int | str
"""A primary key."""

WHOLE_NUMBER = re.compile(r"\s*[+-]?\d{1,30}\s*", re.ASCII)
"""A text that is a key where keys are whole numbers."""


def forms_of(key: Key) -> tuple[Key, ...]:
    """Return a key, and as which other value a collection may have it: "12" for 12, 12 for "12"."""
    if isinstance(key, int):
        return (key, str(key))
    return (key, int(key)) if WHOLE_NUMBER.fullmatch(key) else (key,)


@dataclass(frozen=True, eq=False)
class StoredBank:
    """The bank of one fit, as a generation of a bank collection keeps it."""

    queries: QueryBank
    """The queries of the bank, as the user gave them."""
    potentials: Floats
    """The estimator's result for each query, (|queries|, p) float32; p = 0 if it has none."""
    targets: QueryBank | None = None
    """The target bank, if the estimator needs one."""
    nearest: Sequence[Sequence[Key]] = ()
    """For gated searches, the keys of the items nearest to each query, then to each target."""
    clicks: Mapping[Key, float] = field(default_factory=dict)
    """For a prior from clicks, how often each key was the right one."""

    @property
    def fingerprint(self) -> str:
        """Digest of the queries, and of the targets if there are any; the potentials follow from
        them.
        """
        return self.queries.fingerprint + (f"+{self.targets.fingerprint}" if self.targets else "")

    @cached_property
    def activated(self) -> frozenset[Key]:
        """The keys of all items that are nearest to some query or target."""
        return frozenset(key for keys in self.nearest for key in keys)
