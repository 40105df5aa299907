"""Biases of new rows, from banks in memory or by searches over banks in the database. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from milvus_hubness.banks.generations import StoredBank
from milvus_hubness.client.state_cache import BankSummary, Name, StateCache
from milvus_hubness.client.steps import Ask, Compute, LoadBank, Operation
from milvus_hubness.codec.arrays import Floats
from milvus_hubness.errors import BankTooLarge, EmptyBank, InvalidInput, InvalidParameter, StateError
from milvus_hubness.estimators import from_dict
from milvus_hubness.estimators.nearest import Doubles, Nearest, Needs, masses
from milvus_hubness.state import BankReference, CollectionState, Profile
from milvus_hubness.stores.milvus_banks import all_queries, all_targets, queries_between, targets_between

VECTORS_PER_REQUEST = 100

WINDOW = 16_384
"""Hits and rows that Milvus gives in one answer at most. An answer to several vectors has no more here."""

WIDENING = 4
"""How many times as many nearest rows are asked for where those seen do not tell a bias well enough."""

WHOLE = 2**20
"""Rows of a bank all of whose scores are asked for at last, WINDOW in an answer."""

NUMBERS_PER_PAGE = 2**20
"""Numbers that are read of a bank at once: Python takes some 30 bytes for each."""


class BankSearching(StateCache):
    """Of vectors, by their nearest bank rows."""

    def _biases_by_search(
        self,
        collection: str,
        state: CollectionState,
        profile: Profile,
        vectors: Floats,
        timeout: float | None,
        *,
        are_new: bool,
    ) -> Operation[Floats]:
        """(n,) biases of vectors (n, d) in a profile, within the estimator's tolerance: ever more of a
        vector's nearest rows are asked for, until what the others can add is no more. The bank's index is
        exact. are_new: whether the rows came after the fit; each leaves room for itself alone.

        Raises BankTooLarge where that takes all rows of a bank of more than WHOLE, and EmptyBank where there
        are none.
        """
        estimator = from_dict(profile.estimator)
        yield from self._ensure_loaded(profile.bank.collection, timeout)
        tolerance, of = estimator.needs.tolerance, (collection, state.field, profile.slot)
        summary = yield from self._summary(of, state, profile, estimator.needs, timeout)
        rounds = list(_rounds(estimator.needs, profile.bank.count, summary.targets))
        if not rounds:
            raise self._too_large(profile, f"the {estimator.needs.queries:,} nearest")
        biases = np.full(len(vectors), profile.mean_bias)
        left = np.flatnonzero(~state.layout.invalid(vectors))
        for needs in rounds:
            uncertain = [left[:0]]
            at_once = max(1, min(VECTORS_PER_REQUEST, WINDOW // max(needs.queries, needs.targets, 1)))
            for start in range(0, len(left), at_once):
                rows = left[start : start + at_once]
                nearest = yield from _nearest(state, profile.bank, needs, summary, vectors[rows], timeout)
                queries, targets = nearest
                found = estimator.from_nearest(replace(queries, are_new=are_new), targets)
                if needs is rounds[-1] and found.errors.max() > tolerance:
                    raise self._too_large(
                        profile,
                        f"more of it: the {WINDOW:,} nearest tell a bias to {found.errors.max():.1e} and "
                        f"not to {tolerance:.0e}",
                    )
                biases[rows] = found.biases
                uncertain.append(rows[found.errors > tolerance])
            left = np.concatenate(uncertain)
        return (biases - profile.mean_bias).astype(np.float32)

    def _too_large(self, profile: Profile, needed: str) -> BankTooLarge:
        return BankTooLarge(
            f"the bank {profile.bank.collection!r} of {profile.bank.count:,} queries is larger than "
            f"bank_budget, {self._banks.budget:,} bytes, and {profile.estimator['name']} needs {needed}. "
            'Give a larger budget, or write with bias="pending" and refresh'
        )

    def _summary(
        self, of: Name, state: CollectionState, profile: Profile, needs: Needs, timeout: float | None
    ) -> Operation[BankSummary]:
        """What the estimator needs of the whole bank, which is read once for it, a page at a time."""
        kept = self._banks.summary(of, profile)
        if kept is not None:
            return kept
        bank = profile.bank
        yield from _expect_queries(bank, timeout)
        total: Doubles | None = None
        mass = np.full(len(needs.temperatures), -np.inf)
        fields = ["vector"] * needs.mean + ["potentials"] * bool(needs.temperatures)
        numbers = needs.mean * state.dim + len(needs.temperatures)
        rows = min(WINDOW, NUMBERS_PER_PAGE // max(1, numbers))
        for start in range(0, bank.count if fields else 0, rows):
            page = yield _query(bank, queries_between(bank, start, start + rows), fields, timeout)
            if needs.mean and page:
                queries = state.layout.reduce_queries([row["vector"] for row in page])
                sums = queries.sum(0, dtype=np.float64)
                total = sums if total is None else total + sums
            if needs.temperatures and page:
                mass = masses(_kept_potentials(page, bank, len(mass)), needs.temperatures, mass)
        targets = 0
        if needs.targets:
            [counted] = yield _query(bank, all_targets(bank), ["count(*)"], timeout)
            targets = counted["count(*)"]
            if not targets:
                raise EmptyBank(f"{bank.collection!r} holds no targets of generation {bank.generation}")
        summary = BankSummary(None if total is None else total / bank.count, mass, targets)
        self._banks.keep_summary(of, profile, summary)
        return summary


def _rounds(needs: Needs, queries: int, targets: int) -> Iterator[Needs]:
    """How many nearest to ask for, one after the other; at last for all, where they are not too many."""
    while max(needs.queries, needs.targets) <= WINDOW:
        yield needs
        wider = needs._replace(
            queries=min(needs.queries * WIDENING, WINDOW), targets=min(needs.targets * WIDENING, WINDOW)
        )
        if wider == needs:
            break
        needs = wider
    if max(queries, targets) <= WHOLE:
        yield needs._replace(queries=queries if needs.queries else 0, targets=targets)


def _nearest(
    state: CollectionState,
    bank: BankReference,
    needs: Needs,
    summary: BankSummary,
    vectors: Floats,
    timeout: float | None,
) -> Operation[tuple[Nearest, Nearest | None]]:
    """What the nearest queries, and the nearest targets where they are needed, tell of vectors (m, d)."""
    columns = len(summary.masses)
    scores, potentials = np.empty((len(vectors), 0)), np.empty((len(vectors), 0, columns))
    means, targets = np.empty(0), None
    if summary.mean is not None:
        means = state.layout.reduce_items(vectors) @ summary.mean
    if needs.queries:
        among = [queries_between(bank, *part) for part in _parts(bank.count, needs.queries)]
        scores, potentials = yield from _found(state, bank, among, needs.queries, vectors, columns, timeout)
    queries = Nearest(scores, max(bank.count - needs.queries, 0), means, potentials, summary.masses)
    if needs.targets:
        among = [targets_between(bank, *part) for part in _parts(summary.targets, needs.targets)]
        scores, none = yield from _found(state, bank, among, needs.targets, vectors, 0, timeout)
        rest = max(summary.targets - needs.targets, 0)
        targets = Nearest(scores, rest, np.empty(0), none, np.empty(0))
    return queries, targets


def _parts(count: int, wanted: int) -> list[tuple[int, int]]:
    """The numbers of the rows, from and to, among which the nearest are asked for: in one search where its
    answer can hold them, else in parts that are found whole."""
    size = count if wanted <= WINDOW else WINDOW
    return [(start, start + size) for start in range(0, count, size)]


def _found(
    state: CollectionState,
    bank: BankReference,
    among: Sequence[str],
    wanted: int,
    vectors: Floats,
    columns: int,
    timeout: float | None,
) -> Operation[tuple[Doubles, Doubles]]:
    """Scores (m, N), falling, of the nearest rows that the filters `among` pick, and their potentials
    (m, N, p)."""
    distances, potentials = [], []
    for where in among:
        answers = yield Ask(
            "search",
            (bank.collection,),
            {
                "data": list(vectors),
                "filter": where,
                "limit": min(wanted, WINDOW),
                "anns_field": "vector",
                "output_fields": ["potentials"] if columns else None,
                "timeout": timeout,
            },
        )
        distances.append([[hit["distance"] for hit in hits] for hits in answers])
        kept = np.empty((len(vectors), len(answers[0]), columns))
        if columns:
            kept[:] = [[hit["entity"]["potentials"] for hit in hits] for hits in answers]
        potentials.append(kept)
    scores = np.concatenate(distances, axis=1) * (-0.5 if state.metric == "L2" else 1.0)
    if not scores.shape[1]:
        raise EmptyBank(f"{bank.collection!r} holds no rows of generation {bank.generation} to search")
    order = np.argsort(-scores, axis=1, kind="stable")
    ranked: Doubles = np.take_along_axis(scores, order, 1)
    return ranked, np.take_along_axis(np.concatenate(potentials, axis=1), order[..., None], 1)


def _expect_queries(bank: BankReference, timeout: float | None) -> Operation[None]:
    """Raises EmptyBank where the bank's queries are gone, and StateError where some of them are."""
    [counted] = yield _query(bank, all_queries(bank), ["count(*)"], timeout)
    found = counted["count(*)"]
    if not found:
        raise EmptyBank(f"{bank.collection!r} holds no queries of generation {bank.generation}")
    if found != bank.count:
        raise StateError(
            f"bank {bank.collection!r} holds {found:,} queries and the collection state names "
            f"{bank.count:,}: run refresh with --bank FILE to replace them, or run refresh to use them as "
            "they are"
        )


def _query(bank: BankReference, where: str, fields: list[str], timeout: float | None) -> Ask:
    return Ask("query", (bank.collection,), {"filter": where, "output_fields": fields, "timeout": timeout})


def _kept_potentials(page: Sequence[Mapping[str, Any]], bank: BankReference, columns: int) -> Doubles:
    """(n, p). Raises InvalidInput where a query has another number of them."""
    kept = [row.get("potentials", []) for row in page]
    if any(len(own) != columns for own in kept):
        raise InvalidInput(f"{bank.collection!r} must keep {columns} potentials with every query")
    return np.array(kept, np.float64)


Bias = Literal["compute", "pending"]
"""Whether a new row gets its bias at once, or the mean one until the next refresh."""


class Biasing(BankSearching):
    """Of vectors, in every profile of their field."""

    def _bank(self, collection: str, state: CollectionState, name: str) -> Operation[StoredBank]:
        """The bank of a profile as it was when that was first seen."""
        return self._bank_of(collection, state, state.profiles[name])

    def _bank_of(self, collection: str, state: CollectionState, profile: Profile) -> Operation[StoredBank]:
        of = (collection, state.field, profile.slot)
        bank = self._banks.bank(of, profile)
        if bank is None:
            bank = yield LoadBank(profile.bank)
            self._banks.keep(of, profile, bank)
        return bank

    def _biases(
        self,
        collection: str,
        state: CollectionState,
        vectors: Floats,
        bias: Bias,
        timeout: float | None,
        *,
        are_new: bool,
    ) -> Operation[dict[int, Floats]]:
        """(n,) biases of vectors (n, d) by the slot that they go into: each profile's in its two, and in
        theirs those that a refresh is about to bring, or has just taken away.

        are_new: whether these rows are inserted together. While a job computes all biases anew they get those
        that it would give them: of biases on their way, and of a copy or a second field that is being filled.
        """
        if bias not in ("compute", "pending"):
            raise InvalidParameter(f'bias must be "compute" or "pending", not {bias!r}')
        if bias == "pending":
            return dict.fromkeys(range(state.slots), np.zeros(len(vectors), np.float32))
        biases: dict[int, Floats] = {}
        left = self._banks.budget
        for profile in state.profiles.values():
            room = are_new and state.phase == "ready"
            found = yield from self._biases_of(
                collection, state, profile, vectors, left, timeout, are_new=room
            )
            biases |= {profile.slot: found, profile.standby: found}
        for moving in (state.outgoing, state.incoming):
            if moving is None:
                continue
            # A bank that the other would push out of memory, and it that one, at every write, is searched.
            other = state.profiles.get(moving.name)
            left -= _size(state, other) if other and _size(state, other) <= left else 0
            slot = moving.profile.slot
            biases[slot] = yield from self._biases_of(
                collection, state, moving.profile, vectors, left, timeout, are_new=False
            )
        return biases

    def _locality_hints(
        self, collection: str, state: CollectionState, vectors: Floats, bias: Bias
    ) -> Operation[Floats]:
        """(n, c) what the locality hint columns of vectors (n, d) hold, by the active profile's bank. Zeros,
        which a refresh fills, where that is too large for memory, or the row is left to the next refresh."""
        profile, columns = state.profile, state.layout.locality_hint_count
        if not columns or bias == "pending" or _size(state, profile) > self._banks.budget:
            return np.zeros((len(vectors), columns), np.float32)
        bank = yield from self._bank_of(collection, state, profile)
        of = (collection, state.field, profile.slot)
        found: Floats = yield Compute(
            lambda: self._banks.correction(of, state, profile, bank).locality_hints(vectors)
        )
        return found

    def _biases_of(
        self,
        collection: str,
        state: CollectionState,
        profile: Profile,
        vectors: Floats,
        budget: int,
        timeout: float | None,
        *,
        are_new: bool,
    ) -> Operation[Floats]:
        """budget: bytes that the bank may take."""
        if _size(state, profile) > budget:
            return (
                yield from self._biases_by_search(
                    collection, state, profile, vectors, timeout, are_new=are_new
                )
            )
        bank = yield from self._bank_of(collection, state, profile)

        def compute() -> Floats:
            of = (collection, state.field, profile.slot)
            correction = self._banks.correction(of, state, profile, bank)
            return replace(correction, are_new=are_new).centred(vectors)

        found: Floats = yield Compute(compute)
        return found


def _size(state: CollectionState, profile: Profile) -> int:
    """Bytes of a profile's queries."""
    return 4 * state.dim * profile.bank.count
