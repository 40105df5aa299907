"""The last looks, in the ledger of a database."""

from datetime import datetime, timedelta, timezone

import pytest

from milvus_hubness.errors import ServerUnavailable
from milvus_hubness.jobs.store.records import Record
from milvus_hubness.serve.reconcile import LONGEST_MESSAGE, History, Reconciliation
from tests.serve.worlds import Ledger

START = datetime(2026, 3, 29, tzinfo=timezone.utc)


def outcome(minutes, action="none", result="ok", message="", **facts):
    return Reconciliation(
        at=START + timedelta(minutes=minutes),
        action=action,
        result=result,
        message=message,
        **facts,
    )


def kept(*outcomes):
    """Those of them that are kept."""
    found = History("products", 500)
    for one in outcomes:
        found.add(one)
    return [one.model_copy(update={"oldest_seconds": 0.0}) for one in found.stored]


def test_of_looks_without_events_one_in_ten_minutes_is_kept():
    assert kept(*(outcome(minute) for minute in range(25))) == [
        outcome(0),
        outcome(10),
        outcome(20),
    ]


def test_events_are_all_kept_and_the_first_quiet_look_after_them():
    given = [
        outcome(0),
        outcome(1, "pending"),
        outcome(2, "pending"),
        outcome(3),
        outcome(4),
        outcome(5, "refused"),
        outcome(6),
    ]
    assert kept(*given) == [*given[:4], *given[5:]]


def test_failures_that_are_alike_are_kept_once_though_other_looks_succeed_meanwhile():
    down, broken = (
        outcome(0, result="failed", message=message) for message in ("down", "broken bank")
    )
    given = [
        one.model_copy(update={"at": START + timedelta(minutes=minute)})
        for minute, one in enumerate([down, broken, outcome(0), down, broken, outcome(0), down])
    ]
    assert kept(*given) == given[:3]


def test_the_age_that_biases_had_grown_to_is_kept_though_quiet_looks_are_not():
    found = History("products", 500)
    for minute in (0, 1, 2, 5, 6, 11, 12):
        found.add(outcome(minute, bias_age_seconds=2.0))
    assert [(one.at.minute, one.oldest_seconds) for one in found.outcomes] == [
        (0, 0),
        (11, 302),
        (12, 62),
    ]
    assert len(found.stored) == 2


def test_failed_looks_do_not_make_biases_younger():
    found = History("products", 500)
    found.add(outcome(0, bias_age_seconds=0.0))
    for minute in (1, 2, 3):
        found.add(outcome(minute, result="failed", message="down"))
    found.add(outcome(4, "pending", bias_age_seconds=0.0))
    assert found.stored[-1].oldest_seconds == 240


def test_looks_left_to_another_process_are_not_kept():
    assert kept(outcome(0, result="busy", action="unfinished")) == []


def test_what_could_not_be_written_is_with_the_next():
    class Failing(Ledger):
        def put_records(self, ledger, records):
            raise ServerUnavailable("no answer")

    found, ledger = History("products", 500), Ledger()
    found.add(outcome(0, "full"))
    with pytest.raises(ServerUnavailable):
        found.write(Failing())
    found.add(outcome(1, "pending"))
    found.write(ledger)
    again = History("products", 500)
    again.read(ledger)
    assert again.stored == (outcome(0, "full"), outcome(1, "pending"))


def test_an_error_that_quotes_a_whole_request_is_stored_too(lite):
    history = History("products", 10)
    request = f"cannot parse id in [{'123456789, ' * 10_000}]"
    history.add(outcome(0, result="failed", message=request))
    history.write(lite.store())
    later = History("products", 10)
    later.read(lite.store())
    assert [each.message for each in later.stored] == [request[:LONGEST_MESSAGE]]


def test_entries_of_another_version_are_left_out():
    ledger = Ledger()
    ledger.put_records(
        "", [Record("history/products/x", "history/products", '{"at": "yesterday"}')]
    )
    found = History("products", 500)
    found.read(ledger)
    assert found.stored == ()


def test_a_database_keeps_the_last_of_each_collection(lite):
    store = lite.store()
    facts = {
        "excess_answers": {"raw": 0.3, "new": 0.1},
        "bias_age_seconds": 2.5,
    }
    given = [outcome(minute, "full", **facts) for minute in range(25)]
    products, others = History("products", 10), History("products/vector", 10)
    for one in given:
        products.add(one)
        products.write(store)
    others.add(given[0])
    others.write(store)
    assert len(store.records("hubness_ledger", "history/products")) <= 15
    for label, expected in (("products", given[-10:]), ("products/vector", given[:1])):
        found = History(label, 10)
        found.read(store)
        assert [one.model_copy(update={"oldest_seconds": 0.0}) for one in found.stored] == expected
