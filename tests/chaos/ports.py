"""What trials ask of a database, whichever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

from milvus_hubness.jobs.store.protocols import Store

if TYPE_CHECKING:
    from tests.chaos.moments import Watch
    from tests.chaos.sources import Key, Rows, Shape
    from tests.support.servers import MilvusServer

Sameness = Literal["bit for bit", "within a unit", "in direction"]
"""How near vectors that are read are to those written: within a unit in the last place of each number; or
about as far as the local mode of Qdrant moves those that it brings to length 1, once both are."""


class Application(Protocol):
    """What applications use: a client of ours. Its rows are dictionaries, on any database."""

    def insert(self, name: str, rows: list[dict[str, Any]], /) -> Any: ...

    def upsert(
        self, name: str, rows: list[dict[str, Any]], /, *, partition_name: str = ""
    ) -> Any: ...

    def delete(self, name: str, /, ids: Sequence[Key] | None = None, filter: str = "") -> Any: ...

    def search(self, name: str, /, data: list[Any], limit: int) -> Any: ...

    def query(self, name: str, /, filter: str, output_fields: list[str], **options: Any) -> Any: ...


class Database(ABC):
    """A database that was opened. In the collections of trials a row has its key in `pk` and its vector in
    `vec`; in plain ones in `id` and `vector`."""

    store: Store

    @abstractmethod
    def make_source(self, name: str, shape: Shape, seed: int, *, count: int) -> None:
        """A collection of every kind of field."""

    @abstractmethod
    def make_plain(self, name: str, items: np.ndarray) -> None:
        """A collection under IP with `group` and `note` beside each item, whose place is its key."""

    @abstractmethod
    def application(self, state_ttl: float = 0.0, *, plain: bool = False) -> Application:
        """A new client of ours. plain: of plain collections."""

    @abstractmethod
    def load(self, name: str) -> None:
        """So that it can be read."""

    @abstractmethod
    def put_pending(self, name: str, rows: list[dict[str, Any]], *, partition: str) -> None:
        """Rows that are to get their biases later."""

    @abstractmethod
    def held(self, name: str) -> Rows:
        """All rows as they are stored."""

    @abstractmethod
    def shown(self, name: str) -> Rows:
        """All rows as a client of ours shows them."""

    @abstractmethod
    def counted(self, name: str) -> int:
        """Rows as the database counts them."""

    @abstractmethod
    def biases(self, name: str) -> dict[Key, float]:
        """Of a corrected copy, up to one number for all."""

    @abstractmethod
    def generations(self, bank: str) -> Counter[str]:
        """How many queries there are of each."""

    @abstractmethod
    def collections(self) -> set[str]: ...

    @abstractmethod
    def described(self, name: str) -> Any:
        """All that a user set up of a collection."""

    @abstractmethod
    def aliases(self, name: str) -> set[str]: ...

    @abstractmethod
    def drop(self, name: str) -> None:
        """With its aliases."""

    @abstractmethod
    def sameness(self, metric: str, *, converted: bool) -> Sameness:
        """Of vectors as they are read back. converted: they were in augmented form meanwhile."""


class Program(ABC):
    """The command line on one database. A class, so that a process that is told of it finds it.

    store: the class through which it works."""

    store: ClassVar[type]

    @staticmethod
    @abstractmethod
    def count_requests(watch: Watch) -> None:
        """Every request of this process to the database goes by the watch."""


class Place(ABC):
    """Where a trial happens. folder: for its files. server: one that may be killed."""

    program: ClassVar[type[Program]]

    def __init__(self, folder: Path, server: MilvusServer | None, uri: str) -> None:
        self.folder, self.server, self.uri = folder, server, uri

    @classmethod
    @abstractmethod
    def within(cls, folder: Path, server: MilvusServer | None = None, uri: str = "") -> Place:
        """A new one of the server, or of that at `uri`, or else in a file or folder in `folder`."""

    @property
    def address(self) -> str:
        """What the command line calls it."""
        return self.uri

    @property
    def is_served(self) -> bool:
        """Whether several processes can use it at once."""
        return "://" in self.uri

    @abstractmethod
    def open(self) -> AbstractContextManager[Database]: ...

    @abstractmethod
    def hosted(self) -> AbstractContextManager[Place]:
        """The same, served by this process to others until it ends."""
