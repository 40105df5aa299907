"""A day with a database: rows come and go, the bank is replaced, and all that was due is done."""

import time
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import numpy as np
import pytest
import time_machine
from grpc import _channel

from milvus_hubness import NNN, Copy, QueryBank, Recipe, migrate, plan_correction, refresh
from milvus_hubness.jobs.refresh.status import status
from tests.serve.days import Day
from tests.serve.worlds import Running, config_file
from tests.support.galleries import nnn, plain_collection, vectors

DIM = 16
START = datetime(2026, 3, 28, 0, 0, 30, tzinfo=timezone.utc)


@pytest.fixture
def real_deadlines(monkeypatch):
    """Deadlines of requests are moments of the real clock: the transport compares them with it, and one that is
    computed from the day of the test would be months over."""
    ahead = time.time() - time.monotonic()
    real = SimpleNamespace(time=lambda: time.monotonic() + ahead, perf_counter=time.perf_counter)
    monkeypatch.setattr(_channel, "time", real)


@pytest.mark.long
def test_a_day_of_churn_and_new_banks(lite, tmp_path, real_deadlines):
    rng, name = np.random.default_rng(3), lite.name()
    corrected = f"{name}_live"
    shift = rng.normal(size=DIM) / np.sqrt(DIM)
    gallery = dict(enumerate(vectors(rng, 300, DIM)))
    plain_collection(lite.client(), name, np.array(list(gallery.values())), "IP")
    banks = [
        (vectors(rng, 400, DIM) + 0.1 * drift * shift).astype(np.float32) for drift in range(4)
    ]
    np.save(tmp_path / "bank.npy", banks[0])
    bank = QueryBank(banks[0])
    plan = plan_correction(
        lite.store(), name, Recipe(bank, estimator=NNN(5)), Copy(alias=corrected)
    )
    migrate(lite.store(), plan)
    text = (
        f'[http]\nlisten = "127.0.0.1:0"\n[[collection]]\nname = "{corrected}"\nbank = "bank.npy"\n'
        'fill = "30m"\nrefresh = "0 */6 * * *"\nclient_ttl = 0\n'
    )
    client = lite.hubness_client()
    with (
        time_machine.travel(START, tick=False) as clock,
        Running(config_file(tmp_path, text), refresh, open_store=lite.store) as running,
    ):
        running.wait_for("ready")
        day, hour = Day(clock, running), 0
        while day.next_time < START + timedelta(hours=24):
            moment = day.next_time
            while START + timedelta(hours=hour + 1) <= moment:
                hour += 1
                fresh = {10 * hour + 1_000 + n: row for n, row in enumerate(vectors(rng, 5, DIM))}
                rows = [{"id": key, "vector": row, "group": 1} for key, row in fresh.items()]
                client.insert(corrected, rows)
                gone = rng.choice(list(gallery), 5, replace=False).tolist()
                client.delete(corrected, ids=gone)
                gallery = {key: row for key, row in (gallery | fresh).items() if key not in gone}
                np.save(tmp_path / "bank.npy", banks[hour // 6])
            day.move_to(moment)
            day.settle()
    looks = [event.facts for event in running.heard if event.name == "reconciled"]
    assert [look for look in looks if look["result"] != "ok"] == []
    assert [event for event in running.heard if event.name in ("missed", "warning")] == []
    judged = [look["action"] for look in looks if look["action"] in ("full", "refused")]
    assert len(judged) >= 3
    assert sum(look["action"] == "none" for look in looks) >= 15
    found = status(lite.store(), corrected)
    assert (found.rows, found.pending, found.epoch) == (300, 0, 1 + judged.count("full"))
    in_use = lite.store().info(corrected).state
    bank = lite.store().load_bank(in_use.profile.bank).queries
    rows = client.query(
        corrected, filter="id >= 0", output_fields=["id", "hubness_bias"], limit=1_000
    )
    biases = {row["id"]: row["hubness_bias"] for row in rows}
    assert biases.keys() == gallery.keys()
    items = np.array([gallery[key] for key in biases])
    wanted = nnn(bank.vectors, items, "IP", 5, 0.75, bank.groups) - in_use.profile.mean_bias
    np.testing.assert_allclose(list(biases.values()), wanted, atol=1e-4)
