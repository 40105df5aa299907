"""Where trials happen, and the processes that are killed there."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.chaos import moments
from tests.chaos.milvus import MilvusPlace
from tests.chaos.moments import Moment, Order
from tests.chaos.ports import Place
from tests.chaos.processes import FORKS
from tests.chaos.qdrant import QdrantPlace
from tests.chaos.sources import Shape
from tests.support.servers import MilvusServer

PATIENCE = 180
MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Backend:
    """A database that trials run on, and what it has that others have not.

    place: the class of its places. database: what it is one of. is_embedded: in one process at a time;
    hosts: which can serve it to others. renames: collections. nullable: its fields may be. keys, indexes and
    partitions: what shapes are drawn from; names: whether their vectors have one. rows_per_second: that an
    application may write beside a migration.
    """

    place: type[Place]
    database: str
    is_embedded: bool
    hosts: bool
    renames: bool
    nullable: bool
    keys: tuple[str, ...]
    indexes: tuple[str, ...]
    partitions: tuple[str, ...]
    names: tuple[bool, ...]
    rows_per_second: int

    def server(self) -> contextlib.AbstractContextManager[MilvusServer | None]:
        """One of its own, that may be killed."""
        return contextlib.nullcontext() if self.is_embedded else MilvusServer()

    def shape(self, rng: random.Random, key: str, *, biases: str = "vector") -> Shape:
        """Drawn. biases: where they are to lie. Qdrant's score of L2 is a root, off which none is taken."""
        roots = self.database == "qdrant" and biases == "beside"
        return Shape(
            key,
            metric=rng.choice(["IP", "COSINE"] if roots else ["IP", "COSINE", "L2"]),
            index=rng.choice(self.indexes),
            bias_location=rng.choice(self.partitions),
            nullable=self.nullable,
            is_named=rng.choice(self.names),
        )

    def folder(self, prefix: str) -> tempfile.TemporaryDirectory[str]:
        """For its trials: in memory, where there is such, for Qdrant's local mode, which waits for the disk
        at every point."""
        in_memory = self.database == "qdrant" and os.access(MEMORY, os.W_OK)
        return tempfile.TemporaryDirectory(prefix=prefix, dir=MEMORY if in_memory else None)


_MILVUS = Backend(
    place=MilvusPlace,
    database="milvus",
    is_embedded=False,
    hosts=True,
    renames=True,
    nullable=False,
    keys=("int", "varchar"),
    indexes=("FLAT", "HNSW"),
    partitions=("partition key", "partitions", "none"),
    names=(True,),
    rows_per_second=200,
)
BACKENDS = {
    "server-2.3.5": _MILVUS,
    # It shares one interpreter with the application and the migration.
    "lite": replace(_MILVUS, is_embedded=True, nullable=True, rows_per_second=60),
    "qdrant-local": Backend(
        place=QdrantPlace,
        database="qdrant",
        is_embedded=True,
        hosts=False,
        renames=False,
        nullable=False,
        keys=("int", "uuid", "mixed"),
        indexes=("HNSW",),
        partitions=("none",),
        names=(True, False),
        rows_per_second=60,
    ),
}


class Command:
    """The place's program with these arguments, run in processes of its own. Its output is added to a log."""

    def __init__(
        self, place: Place, argv: tuple[str, ...], *, follows: str = "", client_ttl: float = 0.0
    ) -> None:
        self._place, self._argv = place, argv
        self._common = {"follows": follows, "client_ttl": client_ttl}

    @property
    def log(self) -> Path:
        return self._place.folder / "log"

    def told(self) -> str:
        """The last line of the log."""
        lines = (
            self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        )
        return lines[-1][-400:] if lines else "nothing was printed"

    def order(self, **facts: object) -> Order:
        return Order(self._place.program, self._argv, self.log, **self._common, **facts)

    def started(self, **facts: object) -> BaseProcess:
        """facts: of the order."""
        process = FORKS.Process(target=moments.run, args=(self.order(**facts),), daemon=True)
        process.start()
        return process

    def finished(self, process: BaseProcess) -> int | None:
        """Its exit code."""
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()
            raise AssertionError(f"not ended after {PATIENCE} s: {self.told()}")
        return process.exitcode

    def run(self, **facts: object) -> int | None:
        """The same, started and ended."""
        return self.finished(self.started(**facts))

    def struck(self, victim: str, moment: Moment) -> int | None:
        """Run it and kill, at this moment, the process, the server, which comes back, or both. Its exit code."""
        server = self._place.server
        victims = {
            "process": (0,),
            "server": (server and server.pid,),
            "both": (server and server.pid, 0),
        }
        process = self.started(moment=moment, victims=victims[victim])
        if victim == "process":
            code = self.finished(process)
            assert code in (0, -signal.SIGKILL), f"exited with {code}: {self.told()}"
            return code
        while server.is_running and process.is_alive():
            time.sleep(0.02)
        time.sleep(0.5)
        struck = not server.is_running or process.exitcode == -signal.SIGKILL
        assert struck, f"the moment never came: {self.told()}"
        server.kill()
        server.start()
        return self.finished(process)
