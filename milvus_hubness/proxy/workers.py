"""A proxy that runs until a signal: in this process, or in worker processes that share its port."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from milvus_hubness.errors import InvalidParameter
from milvus_hubness.proxy.options import ProxyOptions
from milvus_hubness.proxy.server import Proxy

GRACE_SECONDS = 10.0
"""Seconds beyond `drain` after which a worker is killed."""
RESTART_SECONDS, LONGEST_PAUSE = 0.5, 30.0
"""Pause before another worker takes the place of one that ended; it doubles while none can serve."""
LISTENING = "listening"

log = logging.getLogger("milvus_hubness")


async def run(options: ProxyOptions, listening: Callable[[int], object]) -> None:
    """Run a proxy until SIGTERM or SIGINT. listening: takes the port. Raises InvalidParameter."""
    serve = _serve if options.workers == 1 else _serve_by_workers
    await _until_signal(serve(options, listening))


async def _until_signal(serving: Coroutine[Any, Any, None]) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    tasks = [asyncio.create_task(work) for work in (serving, stopped.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await tasks[0]


async def _serve(options: ProxyOptions, listening: Callable[[int], object]) -> None:
    async with Proxy(options) as proxy:
        listening(proxy.port)
        await asyncio.Event().wait()


async def _serve_by_workers(options: ProxyOptions, listening: Callable[[int], object]) -> None:
    with _reserved(options) as reserved:
        options = replace(options, port=reserved.getsockname()[1])
        workers: list[Process] = []
        try:
            for _ in range(options.workers):
                workers.append(await _start(options))
            for worker in workers:
                await _expect_listening(worker)
            listening(options.port)
            await asyncio.gather(*(_replace_ended(options, workers, i) for i in range(len(workers))))
        finally:
            await asyncio.gather(*(_stop(worker, options.drain + GRACE_SECONDS) for worker in workers))


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
    """Start a worker, which imports from where this process does. Signals of a terminal reach this process only."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import work; work()"
    command = (sys.executable, "-c", code)
    worker = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)
    if worker.stdin:
        worker.stdin.write(pickle.dumps(options))
    return worker


async def _expect_listening(worker: Process) -> None:
    """Wait until a worker serves. Raises InvalidParameter if it ends instead."""
    if worker.stdout and (line := (await worker.stdout.readline()).decode().strip()) != LISTENING:
        raise InvalidParameter(line or f"a worker ended with exit code {await worker.wait()}")


async def _replace_ended(options: ProxyOptions, workers: list[Process], i: int) -> None:
    """Replace a worker whenever it ends."""
    pause = RESTART_SECONDS
    while True:
        code = await workers[i].wait()
        log.warning("a worker ended with exit code %d: another one starts in %g seconds", code, pause)
        await asyncio.sleep(pause)
        try:
            workers[i] = await _start(options)
            await _expect_listening(workers[i])
            pause = RESTART_SECONDS
        except (InvalidParameter, OSError) as error:
            log.error("a worker cannot serve: %s", error)
            pause = min(2 * pause, LONGEST_PAUSE)


async def _stop(worker: Process, seconds: float) -> None:
    """Stop a worker, which drains its calls, and kill it if it takes longer than that."""
    with suppress(ProcessLookupError):
        worker.terminate()
        await asyncio.wait({asyncio.ensure_future(worker.wait())}, timeout=seconds)
        worker.kill()


def work() -> None:
    """Serve as a worker, and print LISTENING, or why it cannot. Options come from standard input, which ends with the
    process that started this one."""
    options: ProxyOptions = pickle.load(sys.stdin.buffer)

    def end_with_parent() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        asyncio.run(_until_signal(_serve(options, lambda _: print(LISTENING, flush=True))))  # noqa: T201
    except InvalidParameter as error:
        print(error)  # noqa: T201
