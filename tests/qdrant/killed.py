"""The process that is killed: qdrant-hubness itself on a folder of the local mode, its requests counted."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from qdrant_client.local.qdrant_local import QdrantLocal

from milvus_hubness.jobs import lease
from qdrant_hubness import QdrantStore, cli
from qdrant_hubness.store import store
from tests.crash.driver import Moment, Order, Watch
from tests.crash.stages import follow_migration, follow_refresh

FOLLOW = {
    "migrate": follow_migration,
    "rollback": follow_migration,
    "refresh": partial(follow_refresh, store=QdrantStore),
}
REQUESTS = (
    "get_collection", "get_aliases", "get_collection_aliases", "collection_exists", "count", "scroll",
    "retrieve", "upsert", "update_vectors", "set_payload", "delete_payload", "delete", "update_collection",
    "create_collection", "delete_collection", "update_collection_aliases", "query_batch_points",
    "batch_update_points",
)  # fmt: skip
PATIENCE = 120

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.qdrant.killed"])


class Killed(Order):
    """An order of qdrant-hubness."""

    @property
    def course(self) -> Any:
        of_milvus = "migrate" if self.argv[0] == "rollback" else self.argv[0]
        return Order((of_milvus,), self.log).course


def run(order: Killed) -> None:
    """Run the command line as ordered. Exits with its exit code, unless it is killed."""
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    lease.WAITS = False
    watch = Watch(order)
    store.CHUNK_BYTES = order.course.rows_per_chunk * (store.ROW_OVERHEAD_BYTES + 4 * 16)
    for name in REQUESTS:
        setattr(QdrantLocal, name, _counted(name, getattr(QdrantLocal, name), watch))
    FOLLOW[order.argv[0]](watch.enter)
    sys.argv = ["qdrant-hubness", *order.argv]
    try:
        cli.main()
    finally:
        watch.write_down()


def _counted(name: str, call: Any, watch: Watch) -> Any:
    def counted(*args: Any, **options: Any) -> Any:
        due = watch.is_due(name)
        if due and watch.edge == "before":
            watch.strike()
        answer = call(*args, **options)
        if due and watch.edge == "after":
            watch.strike()
        return answer

    return counted


def command(folder: Path, *argv: str, moment: Moment | None = None, counts: Path | None = None) -> int:
    """Its exit code; that of SIGKILL where the moment came."""
    log = folder / "log"
    order = Killed((*argv, "--uri", str(folder / "data"), "--json"), log, moment=moment, counts=counts)
    process = _forks.Process(target=run, args=(order,), daemon=True)
    process.start()
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        raise AssertionError(f"not ended after {PATIENCE} s: {log.read_text()[-400:]}")
    code = process.exitcode
    assert code in (0, 1, -signal.SIGKILL), f"exited with {code}: {log.read_text()[-400:]}"
    return int(code)
