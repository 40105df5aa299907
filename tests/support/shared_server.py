"""The Milvus 2.3.5 that all workers share, if tests need it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import tiers
from tests.support.servers import MilvusServer


class SharedServer:
    """Lives in the process that starts the workers."""

    def __init__(self) -> None:
        self._server: MilvusServer | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell each worker where the server will be."""
        if MilvusServer.unavailable() is None:
            self._server = self._server or MilvusServer(channels=2)
            node.workerinput["server"] = self._server.uri

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Start it, if tests need it. All workers have the same tests."""
        is_needed = any(map(tiers.needs_shared_server, ids))
        if self._server and is_needed and not self._server.is_running:
            self._server.start()

    def pytest_unconfigure(self) -> None:
        if self._server:
            self._server.stop()
            self._server = None
