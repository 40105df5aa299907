"""What users may hold of something that a proxy has only so much of: calls, bytes, streams."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from milvus_hubness.milvus.proxy.headers import Identity


class Shortage(NamedTuple):
    """Why an amount was not given."""

    who: str
    held: int
    limit: int


class Shares:
    """How much each user holds.

    Users who hold all there is take nothing from others: `assured` is everybody's.
    """

    def __init__(self, total: int, most: int, assured: int) -> None:
        self._total = total
        """Of all users together, unless a user holds no more than `assured`."""

        self._most = most
        """Of one user."""

        self._assured = assured

        self.held = 0
        self._held_by: Counter[Identity] = Counter()

    def held_by(self, user: Identity) -> int:
        return self._held_by[user]

    def shortage(self, user: Identity, amount: int) -> Shortage | None:
        """Return why a user cannot have so much more; None if there is enough."""
        held = self._held_by[user]
        if held + amount > self._most:
            return Shortage("this user has", held, self._most)
        if self.held + amount > self._total and held + amount > self._assured:
            return Shortage("all users have", self.held, self._total)
        return None

    def add(self, user: Identity, amount: int) -> None:
        """Count an amount, or a negative one that is given back."""
        self.held += amount
        self._held_by[user] += amount
        if not self._held_by[user]:
            del self._held_by[user]
