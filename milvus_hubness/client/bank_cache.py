"""Banks kept in memory, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from milvus_hubness.correction import Correction
from milvus_hubness.estimators import from_dict
from milvus_hubness.estimators.nearest import Doubles
from milvus_hubness.state import CollectionState, Profile
from milvus_hubness.stores.base import StoredBank

Name = tuple[str, str, int]
"""Collection, field, and the slot that searches of the profile read. A refresh gives a profile another one,
which it tells of before: what was kept for that is at hand then."""


@dataclass(frozen=True, eq=False)
class BankSummary:
    """What is read once of a bank that is searched instead of kept: no more than its estimator needs.

    mean: (d,) float64 of the queries as the layout reduces them. masses: (p,) float64 τ·log Σ exp(f_i/τ) of
    each column of potentials. targets: rows of the target bank.
    """

    mean: Doubles | None
    masses: Doubles
    targets: int


@dataclass(eq=False)
class _Kept:
    profile: Profile
    bank: StoredBank
    correction: Correction | None = None

    @property
    def size(self) -> int:
        targets = self.bank.targets.vectors.nbytes if self.bank.targets else 0
        return self.bank.queries.vectors.nbytes + self.bank.potentials.nbytes + targets


class BankCache:
    """Banks as they were when their profiles were first seen. The one used longest ago goes first; the one in
    use stays, whatever its size. Summaries of others are kept beside them, the latest of each profile."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._kept: OrderedDict[Name, _Kept] = OrderedDict()
        self._summaries: dict[Name, tuple[Profile, BankSummary]] = {}

    def bank(self, name: Name, profile: Profile) -> StoredBank | None:
        """The bank of this very profile, None where it is not kept."""
        kept = self._kept.get(name)
        if kept is None or kept.profile != profile:
            return None
        self._kept.pop(name, None)
        self._kept[name] = kept
        return kept.bank

    def keep(self, name: Name, profile: Profile, bank: StoredBank) -> None:
        """Keep it, and let go of others until all fit."""
        self._kept.pop(name, None)
        self._kept[name] = _Kept(profile, bank)
        while len(self._kept) > 1 and sum(each.size for each in list(self._kept.values())) > self.budget:
            self._kept.popitem(last=False)

    def summary(self, name: Name, profile: Profile) -> BankSummary | None:
        """The summary of this very profile's bank, None where it is not kept."""
        kept = self._summaries.get(name)
        return kept[1] if kept is not None and kept[0] == profile else None

    def keep_summary(self, name: Name, profile: Profile, summary: BankSummary) -> None:
        """Keep it in place of that of an earlier profile."""
        self._summaries[name] = (profile, summary)

    def correction(
        self, name: Name, state: CollectionState, profile: Profile, bank: StoredBank
    ) -> Correction:
        """The fitted estimator over a bank, loaded once for a layout."""
        kept = self._kept.get(name)
        # Profiles that came after one another may have read the same bank at once.
        if kept is not None and (kept.bank is not bank or kept.profile != profile):
            kept = None
        made = kept.correction if kept is not None else None
        if made is not None and made.layout == state.layout:
            return made
        correction = Correction.restore(
            state.layout,
            from_dict(profile.estimator),
            bank.queries,
            bank.potentials,
            target_bank=bank.targets,
            mean_bias=profile.mean_bias,
        )
        if kept is not None:
            kept.correction = correction
        return correction
