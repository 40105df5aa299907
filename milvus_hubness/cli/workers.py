"""The processes of a proxy: this one, or workers that share its port."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe, parent_process
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess

from milvus_hubness.basics.logs import log
from milvus_hubness.cli.console import on_signals
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.milvus.proxy import Proxy, ProxyOptions

GRACE_SECONDS = 10.0
"""Seconds beyond `drain` after which a worker is killed."""
RESTART_SECONDS = 2.0
"""Pause before another worker takes the place of one that ended."""
SWITCH_SECONDS = 0.001
"""Python's threads take turns so often: a search has some ten turns, and threads that work on large
messages of others would hold up each of them for the usual 5 ms."""


def run(options: ProxyOptions, listening: Callable[[int], object]) -> None:
    """Run a proxy until SIGTERM or SIGINT. listening: takes the port. Raises InvalidParameter."""
    if options.workers == 1:
        asyncio.run(serve(options, listening))
        return

    workers: list[Worker] = []
    with suppress(KeyboardInterrupt), on_signals(_interrupt), _reserved(options) as reserved:
        # With port 0, the system has chosen one, which all workers have to share.
        options = replace(options, port=reserved.getsockname()[1])
        try:
            # All are started before the first is waited for: their imports take seconds.
            for _ in range(options.workers):
                workers.append(Worker(options))
            for worker in workers:
                worker.expect_listening()

            listening(options.port)
            _replace_ended(workers, options)
        finally:
            # They drain at the same time, so one deadline is for all.
            until = time.monotonic() + options.drain + GRACE_SECONDS
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join(max(0.0, until - time.monotonic()))
                worker.kill()


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt


async def serve(options: ProxyOptions, listening: Callable[[int], object]) -> None:
    """Run a proxy in this process until SIGTERM or SIGINT.

    A worker also ends with the process that started it.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    parent = parent_process()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)

    # Readable once the parent has ended, even if it was killed.
    if parent:
        loop.add_reader(parent.sentinel, stopped.set)

    async with Proxy(options) as proxy:
        listening(proxy.port)
        await stopped.wait()
        if parent:
            loop.remove_reader(parent.sentinel)


class Worker(SpawnProcess):
    """A process that serves a port together with others."""

    def __init__(self, options: ProxyOptions) -> None:
        super().__init__(daemon=True)
        self._options = options
        self._received, self._refusal = Pipe(duplex=False)
        self.start()
        # Only the worker keeps this end, so that its death is an end of file here.
        self._refusal.close()

    def run(self) -> None:
        """Serve, in the process of the worker; an empty refusal says that it does."""
        try:
            asyncio.run(serve(self._options, lambda _: self._refusal.send("")))
        except InvalidParameter as error:
            self._refusal.send(str(error))

    def expect_listening(self) -> None:
        """Wait until the worker serves. Raises InvalidParameter if it ends instead."""
        try:
            refusal = self._received.recv()
        except EOFError:
            self.join()
            refusal = f"a worker ended with exit code {self.exitcode}"
        if refusal:
            raise InvalidParameter(refusal)


def _replace_ended(workers: list[Worker], options: ProxyOptions) -> None:
    """Replace each worker that ends, for ever."""
    while True:
        wait([worker.sentinel for worker in workers])
        for i, worker in enumerate(workers):
            if worker.exitcode is None:
                continue

            log.warning("a worker ended with exit code %d: another one starts", worker.exitcode)
            time.sleep(RESTART_SECONDS)
            # The others serve on; the next round finds one that did not start, and tries again.
            try:
                workers[i] = Worker(options)
                workers[i].expect_listening()
            except (InvalidParameter, OSError) as error:
                log.error("a worker cannot serve: %s", error)


def _reserved(options: ProxyOptions) -> socket.socket:
    """Return a socket that keeps the port for the workers, and does not listen itself."""
    try:
        # IPv6 addresses may stand in brackets, as before a port.
        host = options.host.strip("[]")
        addresses = socket.getaddrinfo(host, options.port, type=socket.SOCK_STREAM)
        family, socket_type, _, _, address = addresses[0]
        reserved = socket.socket(family, socket_type)
        # Not SO_REUSEPORT yet: with it, the port of another program could be bound too.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except OSError as error:
        raise InvalidParameter(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}"
        ) from None

    # From here on the workers may bind it as well.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return reserved
