"""Threads that each do whole tiles: nobody waits at the end of every operation for the slowest of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock
from typing import TypeVar

import torch

T = TypeVar("T")

_STARTING = Lock()


def share_out(work: Callable[[T], None], tasks: Iterator[T], threads: int) -> None:
    """`work` on each of `tasks`, whichever thread is free; each of torch's operations has one thread there.

    tasks are drawn by one thread at a time. With one thread it is done in this one, with torch as it is set.
    What `work` raises is raised here.
    """
    if threads == 1:
        for task in tasks:
            work(task)
        return
    drawing, started, outside = Lock(), Barrier(threads + 1), torch.get_num_threads()

    def worker() -> None:
        torch.get_num_threads()  # the first call in a thread sets it to what all new threads have
        torch.set_num_threads(1)  # which this changes too
        started.wait()
        while True:
            with drawing:
                task = next(tasks, None)
            if task is None:
                return
            work(task)

    with ThreadPoolExecutor(threads) as pool:
        with _STARTING:
            running = [pool.submit(worker) for _ in range(threads)]
            started.wait()
            torch.set_num_threads(outside)
        for each in running:
            each.result()
