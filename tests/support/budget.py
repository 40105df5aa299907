"""The CPU seconds that the tests of each folder take, beside the budget in tests/README.md.

Tests compute more than they wait, on as many processes as there are cores: who adds a test adds its CPU time to
everybody's. A case's time is that of its process and of the processes that it has ended, from its first fixture on.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGET_ROW = re.compile(r"^\| `(?P<folder>[\w/]+)/` \| (?P<seconds>\d+) \|", re.MULTILINE)
BEGUN = pytest.StashKey[float]()
ELSEWHERE = "imports, collection"
"""What the processes of tests do before and between the cases, and the one that starts them."""


def budget() -> dict[str, int]:
    """Return the CPU seconds of each folder by the table in tests/README.md."""
    text = (ROOT / "tests" / "README.md").read_text()
    return {row["folder"]: int(row["seconds"]) for row in BUDGET_ROW.finditer(text)}


def folder_of(node_id: str) -> str:
    """Return the folder of a test, such as tests/cli; tests for the modules at the top."""
    path = node_id.partition("::")[0].split("/")
    return "/".join(path[: min(2, len(path) - 1)])


def cpu_seconds() -> float:
    """Return the CPU time of this process, and of those that it has waited for."""
    return sum(os.times()[:4])


class Budget:
    """Measures each case in its worker, and prints the sums in the process that reports."""

    def __init__(self) -> None:
        self._elsewhere = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[BEGUN] = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        if report.when == "teardown":
            # Further attributes of a report arrive in the process that prints it.
            report.cpu_seconds = cpu_seconds() - item.stash[BEGUN]
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._elsewhere += getattr(node, "workeroutput", {}).get("cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        spent: Counter[str] = Counter()
        for reports in terminalreporter.stats.values():
            for report in reports:
                if seconds := getattr(report, "cpu_seconds", None):
                    spent[folder_of(report.nodeid)] += seconds
        if self._elsewhere:
            starting = sum(os.times()[:2])
            spent[ELSEWHERE] = self._elsewhere + starting - sum(spent.values())
        if not spent:
            return

        allowed = budget()
        terminalreporter.section("CPU seconds of each folder, and its budget (tests/README.md)")
        for folder, seconds in spent.most_common():
            limit = allowed.get(folder)
            beside = "" if limit is None else f" of {limit}"
            mark = "  <-- above its budget" if limit is not None and seconds > limit else ""
            terminalreporter.write_line(f"{seconds:7.1f}{beside:8} {folder}{mark}")
        terminalreporter.write_line(f"{sum(spent.values()):7.1f} in all")
