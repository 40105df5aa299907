"""The connections of clients: how many there are, whose they are, and which are closed.

gRPC does not say how many connections it has, and closes none. So the sockets of this process are
looked at. All connections on which no call has had a token that Milvus knows count as
those of one user.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from time import monotonic
from typing import NamedTuple
from urllib.parse import unquote

from milvus_hubness.basics.logs import log
from milvus_hubness.milvus.proxy.headers import Identity

MOST_CONNECTIONS = 4_096
"""An idle one takes some 30 KiB."""

OTHER_FILES = 256
"""Files that the process opens and that are no connections of clients: those to Milvus, libraries."""

CROWDED = 0.75
"""From this part of the most connections on, some are closed, so that new ones find a place."""

ROOM = 0.5
"""Down to this part."""

WATCH_SECONDS = 0.1
"""Between two looks at the number of open files."""

FORGET_SECONDS = 60.0
"""Between two looks at which connections have ended."""

_FILES = "/dev/fd"
"""The open files of this process, on Linux and macOS."""


class Peer(NamedTuple):
    """The other end of a connection."""

    address: str
    port: int


class Connection:
    """A connection on which a user that Milvus knows has called."""

    def __init__(self, connections: Connections, peer: Peer | None) -> None:
        self._connections = connections
        self._peer = peer
        self.user: Identity = ()
        self.calls = 0
        self.used = 0.0

    def begin(self, user: Identity) -> None:
        self.user = user
        self.calls += 1
        self.used = monotonic()

    def end(self) -> None:
        self.calls -= 1
        self.used = monotonic()

    def close(self) -> None:
        """End the connection: the client has not taken an answer, and gRPC keeps it until then."""
        log.warning("closed a connection: its client did not take an answer in time")
        for peer, file in self._connections.open_files():
            if peer == self._peer:
                shut_down(file, peer, self._connections.port)


class Connections:
    """The connections to a port of this process, at most `most`."""

    def __init__(self, most: int | None = None) -> None:
        self.port = 0
        self.most = most_connections() if most is None else most
        self._known: dict[Peer, Connection] = {}
        self._seen: dict[Peer, float] = {}
        """When a connection was first seen that is crowded among others."""

    def of(self, peer: str) -> Connection:
        """Return a connection by gRPC's name of its other end."""
        name = _peer_of(peer)
        if name is None:
            return Connection(self, None)

        connection = self._known.get(name)
        if connection is None:
            connection = Connection(self, name)
            self._known[name] = connection
        return connection

    async def watch(self) -> None:
        """Close connections where there are too many, for ever."""
        forgotten = monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            # Without a file that may be opened, they cannot be looked at: then at the next look.
            with suppress(OSError):
                if len(os.listdir(_FILES)) >= CROWDED * self.most:
                    self.make_room()
                elif monotonic() - forgotten >= FORGET_SECONDS:
                    self._forget_ended({peer for peer, _ in self.open_files()})
                    forgotten = monotonic()

    def make_room(self) -> None:
        """Close connections of those users who have the most, where there are too many."""
        files = dict(self.open_files())
        self._forget_ended(files.keys())
        if len(files) < CROWDED * self.most:
            return

        now = monotonic()
        of_users: defaultdict[Identity | None, list[tuple[bool, float, Peer]]] = defaultdict(list)
        for peer in files:
            known = self._known.get(peer)
            if known is None:
                entry = (False, self._seen.setdefault(peer, now), peer)
                of_users[None].append(entry)
            else:
                of_users[known.user].append((known.calls > 0, known.used, peer))

        # Idle ones first, of these the one that was used longest ago.
        for entries in of_users.values():
            entries.sort(reverse=True)
        closed = 0
        while len(files) - closed > ROOM * self.most:
            entries = max(of_users.values(), key=len)
            _, _, peer = entries.pop()
            shut_down(files[peer], peer, self.port)
            closed += 1
        log.warning("closed %d of %d connections: there may be %d", closed, len(files), self.most)

    def open_files(self) -> Iterator[tuple[Peer, int]]:
        """Yield the other end and the file of each connection to the port."""
        for name in os.listdir(_FILES):
            # Most are sockets; a file may be closed meanwhile.
            with suppress(OSError), _borrowed(int(name)) as connection:
                if peer := _other_end(connection, self.port):
                    yield peer, int(name)

    def _forget_ended(self, peers: object) -> None:
        for peer in [
            peer
            for peer, known in self._known.items()
            if not known.calls and peer not in peers  # type: ignore[operator]
        ]:
            del self._known[peer]
        self._seen = {peer: since for peer, since in self._seen.items() if peer in peers}  # type: ignore[operator]


def most_connections() -> int:
    """Return how many connections the limit of open files of this process leaves room for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS

    return min(MOST_CONNECTIONS, files - min(OTHER_FILES, files // 2))


def shut_down(file: int, peer: Peer, port: int) -> None:
    """End the connection of a file. gRPC finds that it has ended, and closes the file.

    The file may be that of another connection by now, so a copy of it is looked at first.
    """
    with suppress(OSError), _borrowed(file) as connection:
        if _other_end(connection, port) == peer:
            connection.shutdown(socket.SHUT_RDWR)


def _borrowed(file: int) -> socket.socket:
    """Return a socket of its own for the connection of a file. Raises OSError if it has none."""
    copy = os.dup(file)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _other_end(connection: socket.socket, port: int) -> Peer | None:
    """Return the other end of a connection to a port of this process; None for any other socket.

    Raises OSError for a socket without another end.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    if connection.getsockname()[1] != port:
        return None

    address, other_port = connection.getpeername()[:2]
    return Peer(_plain(address), other_port)


@lru_cache(MOST_CONNECTIONS)
def _peer_of(name: str) -> Peer | None:
    """Return the other end by gRPC's name: ipv4:127.0.0.1:5000, ipv6:%5B::1%5D:5000."""
    _, _, rest = unquote(name).partition(":")
    address, _, port = rest.rpartition(":")
    try:
        return Peer(_plain(address.strip("[]")), int(port))
    except ValueError:
        return None


def _plain(address: str) -> str:
    """Return an address in its shortest form. Raises ValueError."""
    parsed = ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return str(mapped or parsed)
