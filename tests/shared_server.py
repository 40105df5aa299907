"""One Milvus server for all of pytest's processes, started when the first of them asks for it.

It idles at a fifth of a core, and takes ten seconds to start. Each process has a database of its own there.
"""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

from pymilvus import MilvusClient

from tests.servers import STARTUP_SECONDS, MilvusServer

PAUSE = 0.1


class SharedServer:
    """Of the process that the others were started by: the server ends with it, however it ends."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="milvus-shared-")
        self._over = threading.Event()
        self._serving = threading.Thread(target=self._serve, name="milvus-shared", daemon=True)
        self._serving.start()

    @property
    def folder(self) -> str:
        """Where others ask for it."""
        return self._folder.name

    def stop(self) -> None:
        self._over.set()
        self._serving.join()
        self._folder.cleanup()

    def _serve(self) -> None:
        place = Path(self.folder)
        while not (place / "wanted").exists():
            if self._over.wait(PAUSE):
                return
        try:
            with MilvusServer() as server:
                _tell(place / "uri", server.uri)
                self._over.wait()
        except (RuntimeError, TimeoutError) as error:
            _tell(place / "failed", str(error))


def asked_for(folder: str, database: str) -> str:
    """The URI of this database of the server, which is started, and made, where they are not there yet."""
    place, deadline = Path(folder), time.monotonic() + 2 * STARTUP_SECONDS
    (place / "wanted").touch()
    while not (place / "uri").exists():
        if (place / "failed").exists():
            raise RuntimeError((place / "failed").read_text())
        if time.monotonic() > deadline:
            raise TimeoutError("the shared Milvus server did not start")
        time.sleep(PAUSE)
    uri = (place / "uri").read_text()
    with closing(MilvusClient(uri)) as client:
        if database not in client.list_databases():
            client.create_database(database)
    return f"{uri}/{database}"


def _tell(file: Path, text: str) -> None:
    """All of it at once."""
    draft = file.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(file)
