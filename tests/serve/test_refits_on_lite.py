"""A gallery that grows under the service: one refit at the share, and none after a restart."""

import urllib.request

import numpy as np
import pytest

from milvus_hubness import refresh
from milvus_hubness.serve.config_file import database_faults
from tests.serve.worlds import Running, config_file
from tests.support.databases import OnMilvus
from tests.support.growing import Growing


@pytest.fixture
def growing(lite):
    return Growing(OnMilvus.of(lite), is_created=True)


def settled(running, looks=2):
    """The actions of the reconciliations that begin from now on, so many of them."""
    done = sum(event.name == "reconciled" for event in running.heard)
    # The next one may have begun before this call.
    facts = [running.wait_for("reconciled", done + 2 + look) for look in range(looks)]
    assert {each["result"] for each in facts} == {"ok"}, facts
    return facts


def metrics(running):
    with urllib.request.urlopen(f"{running.url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    gauges = {}
    for line in lines:
        name, _, value = line.partition("{")
        if name in ("milvus_hubness_unfitted_rows_ratio", "milvus_hubness_new_bank_due"):
            gauges[name.removeprefix("milvus_hubness_")] = float(value.split()[-1])
    return gauges


def page(running):
    with urllib.request.urlopen(running.url, timeout=5) as answer:
        return answer.read().decode()


@pytest.mark.long
def test_a_growing_gallery_is_refitted_once(growing, lite, tmp_path):
    np.save(tmp_path / "real.npy", growing.real.vectors)
    text = (
        f'[http]\nlisten = "127.0.0.1:0"\n[[collection]]\nname = "{growing.name}"\n'
        'queries = "real.npy"\nfill = "1d"\nrefresh = "1s"\nclient_ttl = 0\n'
    )
    file = config_file(tmp_path, text)
    with Running(file, refresh, open_store=lite.store) as running:
        running.wait_for("ready")
        growing.grow(40)
        assert {facts["action"] for facts in settled(running)} == {"none"}, "14% are new"
        assert metrics(running)["unfitted_rows_ratio"] == pytest.approx(40 / 280)

        growing.grow(40, first=40)
        due = settled(running)[-1]
        assert due["action"] == "none"
        assert "a new bank is due: 25.0% of the rows are new or changed" in due["message"]
        assert metrics(running) == {"unfitted_rows_ratio": 0.25, "new_bank_due": 1}
        assert "a new bank is due" in page(running)

        growing.sample(200)
        settled(running, looks=3)
        actions = [event.facts["action"] for event in running.heard if event.name == "reconciled"]
        assert actions.count("full") == 1
        assert metrics(running) == {"unfitted_rows_ratio": 0, "new_bank_due": 0}
        assert "a new bank is due" not in page(running).split("Recent runs")[0]

        # The application imports its catalogue again, as it does each night.
        growing.put(dict(growing.rows))
        growing.sample(200)
        assert {facts["action"] for facts in settled(running)} == {"none"}

        # A second service on the same collection has nothing to do.
        with Running(file, refresh, open_store=lite.store) as second:
            assert second.wait_for("reconciled")["result"] == "busy"

    with Running(file, refresh, open_store=lite.store) as again:
        again.wait_for("ready")
        assert {facts["action"] for facts in settled(again)} == {"none"}
    assert growing.profile.epoch == 2
    growing.assert_biases()


def test_a_service_that_starts_again_refits_once(growing, lite, tmp_path):
    np.save(tmp_path / "real.npy", growing.real.vectors)
    text = (
        f'[http]\nlisten = "127.0.0.1:0"\n[[collection]]\nname = "{growing.name}"\n'
        'queries = "real.npy"\nclient_ttl = 0\n'
    )
    file = config_file(tmp_path, text)
    growing.grow(80)
    growing.sample(200)
    outcomes = []
    for _ in range(2):
        outcomes += Running(file, refresh, open_store=lite.store).service.once()
    assert [outcome.action for outcome in outcomes] == ["full", "none"]
    assert "25.0% of the rows are new or changed since the bank was fitted" in outcomes[0].message
    assert [outcome.unfitted_share for outcome in outcomes] == [0, 0]


def test_a_bank_of_the_configuration_is_not_undone_by_a_refit(growing, lite, tmp_path):
    """With the key `bank`, samples would be replaced at the next time: a new bank is due instead."""
    np.save(tmp_path / "bank.npy", growing.bank)
    text = (
        f'[http]\nlisten = "127.0.0.1:0"\n[[collection]]\nname = "{growing.name}"\n'
        'bank = "bank.npy"\nfill = "1d"\nrefresh = "1d"\nclient_ttl = 0\n'
    )
    growing.grow(120)
    growing.sample(200)
    service = Running(config_file(tmp_path, text), refresh, open_store=lite.store).service
    [first], [second] = service.once(), service.once()
    assert [first.action, second.action] == ["none", "none"]
    assert "the given bank is the one in use" in second.new_bank_due
    assert growing.profile.epoch == 1


def test_sampled_queries_are_the_bank_of_a_schedule(growing, lite, tmp_path):
    text = (
        f'[http]\nlisten = "127.0.0.1:0"\n[[collection]]\nname = "{growing.name}"\n'
        'bank = "samples"\nqueries = "real.npy"\nclient_ttl = 0\n'
    )
    np.save(tmp_path / "real.npy", growing.real.vectors)
    file = config_file(tmp_path, text)
    [fault] = database_faults(file, growing.store)
    assert fault.path == ("collection", 0, "bank")
    assert "are sampled: start with milvus-hubness bank sample" in fault.message

    growing.sample(200)
    assert database_faults(file, growing.store) == []
    outcomes = []
    for _ in range(2):
        outcomes += Running(file, refresh, open_store=lite.store).service.once()
    assert [outcome.action for outcome in outcomes] == ["full", "none"]
    bank = growing.store.load_bank(growing.profile.bank).queries.vectors
    sampled = {query.tobytes() for query in growing.queries[:100]}
    assert sum(row.tobytes() in sampled for row in bank) == 100
    growing.assert_biases()
