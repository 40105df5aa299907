"""The Milvus 2.3.5 that all workers share, from their first test on it to the last: it computes as long as it runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import tiers
from tests.support.servers import MilvusServer


class SharedServer:
    """Lives in the process that starts the workers."""

    def __init__(self) -> None:
        self._server: MilvusServer | None = None
        self._tests_left: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell each worker where the server will be."""
        if MilvusServer.unavailable() is None:
            self._server = self._server or MilvusServer(channels=2)
            node.workerinput["server"] = self._server.uri

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Start it, if tests need it. All workers have the same tests."""
        if self._server and not self._tests_left:
            self._tests_left = set(filter(tiers.needs_shared_server, ids))
            if self._tests_left:
                self._server.start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # What runs once more has a report of its teardown only in the end.
        if report.when == "teardown" and report.nodeid in self._tests_left:
            self._tests_left.remove(report.nodeid)
            if not self._tests_left:
                self.pytest_unconfigure()

    def pytest_unconfigure(self) -> None:
        if self._server:
            self._server.stop()
            self._server = None
