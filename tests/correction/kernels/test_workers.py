"""Tasks shared out to threads: each done once, torch single-threaded in them and as it was outside."""

from __future__ import annotations

import threading

import pytest
import torch
from threadpoolctl import threadpool_info

from milvus_hubness.correction.kernels.operands import share_out


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_every_task_is_done_once_and_torch_keeps_its_threads(three_threads):
    done, threads, both = [], set(), threading.Barrier(3, timeout=20)

    def work(task):
        if task < 3:
            both.wait()
        threads.add(threading.get_ident())
        done.append((task, torch.get_num_threads()))

    share_out(work, iter(range(50)), 3)
    assert sorted(done) == [(task, 1) for task in range(50)]
    assert len(threads) == 3
    assert threading.get_ident() not in threads
    assert torch.get_num_threads() == 3
    with_new_thread = []
    thread = threading.Thread(target=lambda: with_new_thread.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert with_new_thread == [3]


def test_one_thread_is_the_callers():
    seen = []
    share_out(lambda task: seen.append((task, threading.get_ident())), iter("ab"), 1)
    assert seen == [("a", threading.get_ident()), ("b", threading.get_ident())]


@pytest.mark.parametrize("threads", [1, 2])
def test_what_a_task_raises_is_raised(three_threads, threads):
    def work(task):
        if task == 4:
            raise ValueError("the fourth")

    with pytest.raises(ValueError, match="the fourth"):
        share_out(work, iter(range(9)), threads)
    assert torch.get_num_threads() == 3


def numpy_threads():
    return [
        library["num_threads"]
        for library in threadpool_info()
        if "numpy.libs" in library["filepath"]
    ]


def test_a_second_call_runs_in_its_own_thread_and_numpy_keeps_its_threads(three_threads):
    inside, leave, seen = threading.Barrier(2, timeout=20), threading.Event(), []

    def first_task(task):
        inside.wait()
        leave.wait(20)
        seen.append(numpy_threads())

    before = numpy_threads()
    first = threading.Thread(target=share_out, args=(first_task, iter("a"), 2))
    first.start()
    inside.wait()
    share_out(lambda task: seen.append(threading.get_ident()), iter("b"), 2)
    leave.set()
    first.join()
    assert seen == [threading.get_ident(), [1]]
    assert numpy_threads() == before
