"""Where trials happen, and the processes that are killed there."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from milvus_lite.server_manager import server_manager_instance
from pymilvus import MilvusClient

from milvus_hubness.stores.milvus_rpc import connect
from tests.crash import driver
from tests.crash.driver import Moment, Order
from tests.servers import MilvusServer, lite_uri

BACKENDS = ("server-2.3.5", "lite")
PATIENCE = 180

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.crash.driver"])


class Place:
    """server: None on Milvus Lite, where a file has one process at a time; and where nobody may kill it."""

    def __init__(self, folder: Path, server: MilvusServer | None, uri: str) -> None:
        self.folder, self.server, self.uri = folder, server, uri

    @classmethod
    def within(cls, folder: Path, server: MilvusServer | None, uri: str = "") -> Place:
        """A new one of the server, or of that at `uri`, or else a file of Milvus Lite's, in `folder`."""
        made = Path(tempfile.mkdtemp(prefix="trial-", dir=folder))
        return cls(made, server, (server.uri if server else uri) or lite_uri(made))

    @property
    def is_served(self) -> bool:
        return "://" in self.uri

    @contextlib.contextmanager
    def open(self) -> Iterator[MilvusClient]:
        client = connect(self.uri)
        try:
            yield client
        finally:
            client.close()
            if not self.is_served:
                server_manager_instance.release_server(self.uri)

    @contextlib.contextmanager
    def hosted(self) -> Iterator[Place]:
        """The same file of Milvus Lite's, served by this process to others until it ends."""
        uri = server_manager_instance.start_and_get_uri(self.uri)
        assert uri, f"Milvus Lite did not open {self.uri}"
        try:
            yield Place(self.folder, None, uri)
        finally:
            server_manager_instance.release_server(self.uri)


class Command:
    """milvus-hubness with these arguments, run in processes of its own. Its output is added to a log."""

    def __init__(self, place: Place, argv: tuple[str, ...]) -> None:
        self._place, self._argv = place, argv

    @property
    def log(self) -> Path:
        return self._place.folder / "log"

    def told(self) -> str:
        """The last line of the log."""
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return lines[-1][-400:] if lines else "nothing was printed"

    def order(self, **facts: object) -> Order:
        return Order(self._argv, self.log, **facts)

    def started(self, **facts: object) -> BaseProcess:
        """facts: of the order."""
        process = _forks.Process(target=driver.run, args=(self.order(**facts),), daemon=True)
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
        """Run it and kill, at this moment, the process, the server, which comes back, or both. Its exit
        code."""
        server = self._place.server
        victims = {"process": (0,), "server": (server and server.pid,), "both": (server and server.pid, 0)}
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


def be_quiet() -> None:
    torch.set_num_threads(1)
    for library in ("pymilvus", "milvus_lite", "milvus_hubness"):
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)


def said(error: BaseException) -> str:
    """What a failed assertion says, or the line that does not hold; of other errors their class too."""
    if not isinstance(error, AssertionError):
        return f"{type(error).__name__}: {error}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return str(error).partition("\nassert")[0] or f"not so: {frame.line}"
