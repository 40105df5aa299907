"""What a migration tells, to whom, in which order."""

import json
import threading
from datetime import datetime, timedelta, timezone

import numpy as np
import pytest

from milvus_hubness.jobs.common.progress import Event, Events


def test_listeners_are_told_in_their_order():
    heard = []
    events = Events(
        [
            lambda event: heard.append(("a", event.name)),
            lambda event: heard.append(("b", event.name)),
        ],
    )
    events.report("plan")
    events.report("copying", rows=3)
    assert heard == [(who, name) for name in ("plan", "copying") for who in ("a", "b")]


def test_an_event_carries_its_facts_and_the_time_in_utc():
    heard = []
    Events([heard.append]).report("before-copy", source="products", name="a fact of that name")
    [event] = heard
    assert event.facts == {"source": "products", "name": "a fact of that name"}
    assert event.time.utcoffset() == timedelta(0)
    assert abs(datetime.now(timezone.utc) - event.time) < timedelta(seconds=5)


def test_an_event_survives_json():
    facts = {
        "rows": np.int64(3),
        "seconds": np.float32(0.5),
        "eta_seconds": float("inf"),
        "keys": ("a", 2),
        "ok": True,
        "plan": {"at": datetime(2025, 1, 2, tzinfo=timezone.utc), 7: None},
        "error": ValueError("no"),
    }
    event = Event("copying", facts, datetime(2025, 1, 2, 3, 4, 5, tzinfo=timezone.utc))
    assert json.loads(json.dumps(event.to_dict(), allow_nan=False)) == {
        "name": "copying",
        "time": "2025-01-02T03:04:05+00:00",
        "facts": {
            "rows": 3,
            "seconds": 0.5,
            "eta_seconds": None,
            "keys": ["a", 2],
            "ok": True,
            "plan": {"at": "2025-01-02T00:00:00Z", "7": None},
            "error": "no",
        },
    }


def test_listeners_hear_one_event_at_a_time():
    inside, most = [], []

    def listener(event):
        inside.append(event)
        most.append(len(inside))
        threading.Event().wait(0.001)
        inside.pop()

    events = Events([listener])
    threads = [
        threading.Thread(target=lambda: [events.report("copying") for _ in range(10)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 40


def test_what_a_listener_raises_reaches_who_told():
    def refuse(event):
        raise RuntimeError(event.name)

    with pytest.raises(RuntimeError, match="before-copy"):
        Events([refuse]).report("before-copy")
