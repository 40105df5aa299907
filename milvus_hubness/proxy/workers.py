"""A proxy that runs until a signal: in this process, or in worker processes that share its port."""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.proxy.options import ProxyOptions
from milvus_hubness.proxy.server import Proxy

GRACE_SECONDS = 10.0
"""Seconds beyond `drain` after which a worker is killed."""
RESTART_SECONDS = 0.5
"""Pause before another worker takes the place of one that ended."""
LISTENING = "listening"

log = logging.getLogger("milvus_hubness")


async def run(options: ProxyOptions, listening: Callable[[int], object]) -> None:
    """Run a proxy until SIGTERM or SIGINT. listening: takes the port. Raises InvalidParameter."""
    stopped = _stopped()
    if options.workers == 1:
        async with Proxy(options) as proxy:
            listening(proxy.port)
            await stopped.wait()
        return
    with _reserved(options) as reserved:
        options = replace(options, port=reserved.getsockname()[1])
        workers = [await _start(options) for _ in range(options.workers)]
        for worker in workers:
            if worker.stdout and (line := (await worker.stdout.readline()).decode().strip()) != LISTENING:
                raise InvalidParameter(line or f"a worker ended with exit code {await worker.wait()}")
        listening(options.port)
        tasks = [asyncio.create_task(_replace_ended(options, worker)) for worker in workers]
        await stopped.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _stopped() -> asyncio.Event:
    """Return an event that the signals to stop set."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


def _reserved(options: ProxyOptions) -> socket.socket:
    """Return a socket that keeps the port from others but the workers, and does not listen itself."""
    host = options.host.strip("[]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, options.port, type=socket.SOCK_STREAM)[0]
        reserved = socket.socket(family, kind)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except OSError as error:
        raise InvalidParameter(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from None
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return reserved


async def _start(options: ProxyOptions) -> Process:
    """Start a worker, which ends when this process does. Its first line is LISTENING, or why it cannot serve."""
    worker = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, stdin=PIPE, stdout=PIPE)
    if worker.stdin:
        worker.stdin.write(pickle.dumps(options))
    return worker


async def _replace_ended(options: ProxyOptions, worker: Process) -> None:
    """Replace a worker whenever it ends. If cancelled, stop it, which drains its calls."""
    try:
        while True:
            code = await worker.wait()
            log.warning("a worker ended with exit code %d: another one starts", code)
            await asyncio.sleep(RESTART_SECONDS)
            worker = await _start(options)
    finally:
        with suppress(ProcessLookupError):
            worker.terminate()
            await asyncio.wait({asyncio.ensure_future(worker.wait())}, timeout=options.drain + GRACE_SECONDS)
            worker.kill()


async def _work() -> None:
    """Serve as a worker: options come from standard input, whose end stops it as a signal does."""
    options: ProxyOptions = pickle.load(sys.stdin.buffer)
    stopped = _stopped()
    asyncio.get_running_loop().add_reader(sys.stdin, stopped.set)
    try:
        async with Proxy(options):
            print(LISTENING, flush=True)  # noqa: T201
            await stopped.wait()
    except InvalidParameter as error:
        print(error)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(_work())
