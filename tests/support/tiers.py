"""Which tests run in which tier, in which order, and on which worker.

`make test` runs every test on Milvus Lite and on Qdrant's local mode, one case of each test function on Milvus 2.3.5,
and some cases on the strict Qdrant server. `make test-server` runs the other cases on servers, `make test-long` and
`make crash` what takes hours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support import servers

SERVERS = {
    "server-2.3.5": servers.MilvusServer,
    "server-current": servers.CurrentMilvus,
    "qdrant-server": servers.QdrantServer,
}
IN_EVERY_TIER = "server-2.3.5"
STRICT = ("strict", "qdrant-strict")
"""The strict Qdrant server, see tests/qdrant/strict: its requests cost about three times those of the local mode."""
EVERYDAY_ON_STRICT = (
    "congruence/test_store.py", "qdrant/test_store.py", "qdrant/test_enabling.py", "rows_deleted_meanwhile",
    "stays[Dot-strict]", "halves_are_stored", "from_corrected_scores[strict-rrf]",
    "without_a_direction", "while_biases_are_written_stays[strict-Dot]",
)  # fmt: skip
"""Parts of the names of the cases on it that `make test` runs; `make test-long` runs the others."""
USES_THE_SERVER = ("[server-2.3.5", "/chaos/test_clients.py", "_on_a_server", "of_another_database")
ALONE = ("whose_server_is_killed", "test_any_call_is_held")
WAITING = (*USES_THE_SERVER, "/chaos/")
LONGEST_FIRST = (*ALONE, "test_migrate.py", "test_copy_index", "demo", "/extras/ray/", "/kernels/")


def server_of(item: pytest.Item) -> str | None:
    """Return the server on which a case runs; None for Milvus Lite, Qdrant's local mode and units."""
    return next((value for value in _params(item).values() if value in SERVERS), None)


def is_left_out(item: pytest.Item) -> bool:
    """Whether another case shows the same, or the database cannot hold what the case is about.

    A module's MADE names, by a fixture or test function, the parameters of the cases that are made. On servers,
    tests marked `lite_only` are left out, and ON_SERVERS names, by fixture or parameter, the values with which a
    module runs. tests/test_servers.py has one test for each server that says why it is missing.
    """
    params = _params(item)
    for name, allowed in getattr(item.module, "MADE", {}).items():
        is_meant = name in (item.originalname, *item.fixturenames)  # type: ignore[attr-defined]
        if is_meant and any(params.get(param) not in values for param, values in allowed.items()):
            return True
    server = server_of(item)
    if server is None:
        return False
    if item.get_closest_marker("lite_only") or SERVERS[server].unavailable():
        return True
    on_servers = getattr(item.module, "ON_SERVERS", {})
    return any(value not in on_servers.get(name, [value]) for name, value in params.items())


def mark_tiers(items: list[pytest.Item]) -> None:
    """Mark the cases of `make test-server`: all on servers but each function's first on Milvus 2.3.5."""
    first: set[str] = set()
    for item in items:
        server = server_of(item)
        if server is None:
            mark_strict(item)
            continue
        function = item.nodeid.partition("[")[0]
        if (
            server != IN_EVERY_TIER
            or function in first
            or item.get_closest_marker("beyond_contract")
        ):
            item.add_marker(pytest.mark.server)
        else:
            first.add(function)


def mark_strict(item: pytest.Item) -> None:
    is_strict = any(value in STRICT for value in _params(item).values())
    if is_strict and not any(part in item.nodeid for part in EVERYDAY_ON_STRICT):
        item.add_marker(pytest.mark.long)


def needs_shared_server(nodeid: str) -> bool:
    """Whether a test runs on the Milvus 2.3.5 that all workers share."""
    return any(part in nodeid for part in USES_THE_SERVER)


def given_server_of(nodeid: str) -> str:
    """Return the variable of a given server on which a test runs; "" if it runs on none. Such a server is the same for
    all workers, so that only one of them may use its names of aliases and its ledger."""
    places = {"server-current": "MILVUS_URI", "qdrant-server": "QDRANT_URL"}
    return next(
        (name for kind, name in places.items() if kind in nodeid and servers.given(name)), ""
    )


def scope_of(nodeid: str) -> str:
    """Return what a test shares a worker with: the tests of its module on one database, with what was made for the
    module. Tests on Ray share one worker and its cluster, the demo and the examples the functions that they read. A
    long trial is alone."""
    file = nodeid.split("::")[0]
    if given := given_server_of(nodeid):
        return given
    if any(part in nodeid for part in ALONE):
        return nodeid
    if "/demo/" in file or "test_example" in file:
        return "demo"
    if "/extras/ray/" in file:
        return file.rpartition("/")[0]
    return f"{file} on the server" if needs_shared_server(nodeid) else file


def order(items: list[pytest.Item]) -> None:
    """Sort scopes so that some workers wait for a server while others compute, and no worker is alone in the end:
    the longest come first, and those that wait end when three quarters of the others have run."""
    scopes: dict[str, list[pytest.Item]] = {}
    for item in items:
        scopes.setdefault(scope_of(item.nodeid), []).append(item)

    def length(scope: str) -> int:
        return next(
            (i for i, part in enumerate(LONGEST_FIRST) if part in scope), len(LONGEST_FIRST)
        )

    def waits(scope: str) -> bool:
        return any(part in scopes[scope][0].nodeid for part in WAITING)

    by_length = sorted(scopes, key=length)
    waiting = [scope for scope in by_length if waits(scope)]
    computing = [scope for scope in by_length if not waits(scope)]
    places = {scope: 0.75 * i / len(waiting) for i, scope in enumerate(waiting)}
    places |= {scope: i / len(computing) for i, scope in enumerate(computing)}
    items[:] = [item for scope in sorted(places, key=places.__getitem__) for item in scopes[scope]]


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def _params(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return dict(_hashable(callspec.params)) if callspec else {}


def _hashable(params: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in params.items():
        if isinstance(value, str | int | tuple):
            yield name, value
