"""Waiting for a copy that Qdrant optimises: with a word, with an end, and beside writes."""

import logging
from types import SimpleNamespace

import pytest
from qdrant_client import models

from milvus_hubness import StoreError
from milvus_hubness.basics.waiting import WaitPolicy, wait_until
from qdrant_hubness.store.optimiser import Optimiser
from tests.qdrant.strict import StrictServer
from tests.qdrant.worlds import Backend
from tests.support.times import Time

YELLOW, GREEN = models.CollectionStatus.YELLOW, models.CollectionStatus.GREEN


def described(status, indexed=0, points=0, error=None):
    problem = SimpleNamespace(error=error) if error else "ok"
    return SimpleNamespace(
        status=status, indexed_vectors_count=indexed, points_count=points, optimizer_status=problem
    )


def waited(answers, *, busy_seconds=120.0):
    """Wait for these answers, and return the seconds."""
    time_of = Time()
    optimiser = Optimiser("products", busy_seconds=busy_seconds, clock=time_of.clock)
    policy = WaitPolicy(limit=3_600)
    wait_until(
        "Qdrant",
        lambda: optimiser.standing(next(answers)),
        policy,
        clock=time_of.clock,
        sleep=time_of.sleep,
    )
    return time_of.now


def test_it_waits_while_the_optimiser_gets_further():
    """However long that takes: less is left than ever."""
    answers = [described(YELLOW, indexed, 1_000) for indexed in range(0, 1_000, 10)]
    assert waited(iter([*answers, described(GREEN)])) > 300


def test_beside_writes_it_goes_on_with_a_line(caplog):
    def writing():
        points = 1_000
        while True:
            points += 10
            yield described(YELLOW, points - 200 + points % 50, points)

    with caplog.at_level(logging.WARNING):
        seconds = waited(writing())
    assert 120 <= seconds <= 200
    assert "writes keep the optimiser of 'products' busy" in caplog.messages[-1]
    assert "searches find all points" in caplog.messages[-1]


def test_an_optimiser_that_failed_is_an_error_at_once():
    with pytest.raises(
        StoreError, match="'products': no space left on device: see the server's log"
    ):
        waited(iter([described(models.CollectionStatus.RED, error="no space\nleft on device")]))


def test_a_collection_that_waits_for_a_change_gets_one():
    server = StrictServer()
    backend = Backend("strict", server.client())
    backend.client.create_collection(
        "c", vectors_config=models.VectorParams(size=4, distance="Dot")
    )
    collection, answers = server.collections["c"], []

    def described_once(yellow_seconds, original=collection.described):
        info = original(yellow_seconds)
        changed = any(method == "PATCH" for method, *_ in server.requests)
        answers.append(changed)
        return info if changed else info.model_copy(update={"status": models.CollectionStatus.GREY})

    collection.described = described_once
    backend.store().load("c")
    assert answers == [False, True]
