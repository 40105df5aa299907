"""Writes noted in a write-intent log while a job rewrites the rows, without a database: in every order in
which their requests can reach one."""

import itertools
import json
import operator
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from pymilvus import DataType
from pymilvus.exceptions import ErrorCode, MilvusException, ParamError

from milvus_hubness import MilvusStore
from milvus_hubness.errors import NotCaughtUp, WriteIntentFailed
from milvus_hubness.jobs.common.lease_records import LeasePolicy
from milvus_hubness.jobs.common.row_writer import RowContent, RowWriter, _Repair
from milvus_hubness.jobs.store.generations import Batch
from milvus_hubness.jobs.store.ownership import WRITE_INTENTS_OF_PROPERTY, CollectionId
from milvus_hubness.jobs.store.records import WRITE_INTENTS_PROPERTY, WriteIntentLog
from milvus_hubness.milvus.client.messages import Deletion, Write
from milvus_hubness.milvus.client.methods import drive
from milvus_hubness.milvus.client.operations import Operations
from milvus_hubness.milvus.client.steps import Ask, LearnSchema
from milvus_hubness.milvus.store.write_intents import NAME_FIELD, NOTE_KEY_FIELD

HERE, JOURNAL, ROWS = "here", "here__write_intents_0a1b2c3d", "here__write_intents_0a1b2c3d_rows"
KEYS = {HERE: "id", JOURNAL: NOTE_KEY_FIELD, ROWS: NAME_FIELD}
AN_HOUR = 3_600.0


CONTENT = RowContent(field="vector", dim=2, hidden=("bias",), epoch="epoch")


class Job(MilvusStore):
    """A store whose ledger is in memory: its requests come between nothing."""

    def put_records(self, ledger, records):
        pass

    drop_records = put_records


def row_writer(job, intent_log, **policy):
    lease = SimpleNamespace(store=job, token=1, check=lambda: None, policy=LeasePolicy(**policy))
    info = SimpleNamespace(name=HERE, states={})
    codec = SimpleNamespace(hidden_fields=("bias",), epoch_field="epoch")
    state = SimpleNamespace(field="vector", dim=2, codec=codec)
    return RowWriter(lease, info, state, intent_log)


def missing(name):
    return MilvusException(ErrorCode.COLLECTION_NOT_FOUND, f"can't find collection {name}")


class Database:
    """As much of a MilvusClient as a job and the clients' operations ask of it, over tables in memory."""

    def __init__(self, count=4, **intent_log):
        rows = {
            key: {"id": key, "vector": [1.0, 0.0], "note": "old", "bias": 0} for key in range(count)
        }
        self.tables = {HERE: rows, JOURNAL: {}, ROWS: {}}
        self.intent_log = WriteIntentLog(collection=JOURNAL, made="now", **intent_log)
        self.announced, self.asked, self.before, self.failing = True, [], lambda: None, {}

    def __getattr__(self, method):
        def request(*args, **options):
            name = args[0] if args else ""
            if method != "describe_collection":
                self.before()
            self.asked.append((method, name))
            if failure := self.failing.get((method, name)):
                raise failure
            if name and name not in self.tables:
                raise missing(name)
            return getattr(self, f"_{method}")(*args, **options)

        return request

    def _get_server_version(self):
        return "2.6.18"

    def _get_load_state(self, name):
        return {"state": type("Loaded", (), {"name": "Loaded"})}

    def _list_partitions(self, name, timeout=None):
        return ["_default", "other"]

    def _describe_collection(self, name, timeout=None):
        fields = [
            {"name": KEYS[name], "type": DataType.INT64 if name == HERE else DataType.VARCHAR},
            {"name": "vector", "type": DataType.FLOAT_VECTOR, "params": {"dim": 2}},
        ]
        fields[0]["is_primary"] = True
        properties = {}
        if name != HERE:
            properties = {WRITE_INTENTS_OF_PROPERTY: CollectionId(name=HERE).model_dump_json()}
        elif self.announced:
            properties = {WRITE_INTENTS_PROPERTY: self.intent_log.model_dump_json()}
        return {"fields": fields, "collection_name": name, "properties": properties}

    def _query(self, name, filter="", output_fields=None, *args, **options):
        if output_fields == ["count(*)"]:
            return [{"count(*)": len(self.tables[name])}]
        found = [dict(row) for row in self.tables[name].values() if matches(row, filter)]
        limit = options.get("limit") or len(found)
        return sorted(found, key=lambda row: row[KEYS[name]])[:limit]

    def _upsert(self, name, data, timeout=None, partition_name="", partial_update=False):
        for row in [data] if isinstance(data, dict) else data:
            held = self.tables[name].get(row[KEYS[name]], {}) if partial_update else {}
            self.tables[name][row[KEYS[name]]] = {**held, **row}
        return {"ids": [row[KEYS[name]] for row in ([data] if isinstance(data, dict) else data)]}

    _insert = _upsert

    def _delete(self, name, ids=None, timeout=None, filter=None, partition_name=None):
        keys = [ids] if isinstance(ids, int) else ids or []
        gone = [
            k
            for k, row in self.tables[name].items()
            if k in keys or (filter and matches(row, filter))
        ]
        for key in gone:
            del self.tables[name][key]
        return {"delete_count": len(gone)}


SIGNS = {
    "in": lambda held, wanted: held in wanted,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


def matches(row, filter):
    """Of the filters that are asked here."""
    found = [
        re.fullmatch(r"\(?(\w+) (in|==|>|<) (.+?)\)?", part).groups()
        for part in filter.split(" and ")
        if part
    ]
    return all(SIGNS[sign](row.get(field), json.loads(value)) for field, sign, value in found)


def client(database, state_ttl=AN_HOUR):
    """Operations that have seen the collection."""
    operations = Operations(None, state_ttl, 1 << 20)
    drive(operations.states.cached_state(HERE), lambda step: answered(database, step))
    return operations


def answered(database, step):
    if isinstance(step, LearnSchema):
        return None
    assert isinstance(step, Ask)
    return getattr(database, step.method)(*step.args, **step.options)


def row(key, note):
    return {"id": key, "vector": [0.0, 1.0], "note": note, "bias": 1}


def write(method, data, **options):
    return lambda operations: operations.dual_writes.write(
        Write(method, HERE, data, options=options)
    )


def delete(ids=None, filter=None):
    return lambda operations: operations.dual_writes.delete(Deletion(HERE, ids, filter=filter))


WRITES = {
    "insert": [write("insert", [row(9, "new"), row(1, "new")])],
    "update": [write("upsert", [row(1, "new"), row(2, "new")])],
    "one row": [write("upsert", row(1, "new"))],
    "partial update": [write("upsert", [{"id": 1, "note": "new"}], partial_update=True)],
    "partial updates": [
        write("upsert", [{"id": 1, "note": "new"}], partial_update=True),
        write("upsert", [{"id": 1, "vector": [0.5, 0.5]}], partial_update=True),
    ],
    "partial update of a deleted row": [
        delete([1]),
        write("upsert", [row(1, "new")], partial_update=True),
    ],
    "delete": [delete([1, 2])],
    "delete one": [delete(1)],
    "delete by filter": [delete(filter='note == "old"')],
    "update twice": [write("upsert", [row(1, "first")]), write("upsert", [row(1, "second")])],
    "delete and insert": [delete([1]), write("insert", [row(1, "new")])],
    "update and delete": [write("upsert", [row(1, "new")]), delete([1])],
}


class Interleaved:
    """A job that gives all rows another bias, and writes of clients: before each of its requests so many of
    theirs as `turns` says; those that are left come after it. seed: how those of several clients mix."""

    def __init__(self, writes, turns, *others, seed=0):
        self.database, self.turns = Database(), iter(turns)
        rng = random.Random(seed)
        self.requests = mixed([self._requests(each) for each in (writes, *others)], rng)

    def _requests(self, writes):
        operations = client(self.database)
        for make in writes:
            operation, outcome, error = make(operations), None, None
            while True:
                try:
                    step = operation.send(outcome) if error is None else operation.throw(error)
                except StopIteration:
                    break
                asked = isinstance(step, Ask) and step.method not in (
                    "describe_collection",
                    "get_server_version",
                )
                if asked:
                    yield
                outcome, error = None, None
                try:
                    outcome = answered(self.database, step)
                except MilvusException as raised:
                    error = raised

    def turn(self):
        self.database.before = lambda: None
        for _ in range(next(self.turns, 0)):
            next(self.requests, None)
        self.database.before = self.turn

    def run(self, mend=True):
        next(self.requests, None)  # up to the first request
        job = Job(self.database)
        writer = row_writer(job, self.database.intent_log if mend else None)
        self.database.before = self.turn
        batch = job.get(HERE, [0, 1, 2, 3], "vector")
        for each in batch.rows:
            each["bias"] = 5
        writer.rewrite(batch, ["bias"], None)
        self.database.before = lambda: None
        list(self.requests)
        return {
            key: (list(row["vector"]), row["note"])
            for key, row in self.database.tables[HERE].items()
        }


def mixed(iterators, rng):
    while iterators:
        picked = rng.choice(iterators)
        try:
            yield next(picked)
        except StopIteration:
            iterators.remove(picked)


def alone(writes):
    """What the writes make of the rows where nobody else writes, and how many requests that takes."""
    here = Interleaved(writes, ())
    requests = sum(1 for _ in here.requests)
    return {
        key: (row["vector"], row["note"]) for key, row in here.database.tables[HERE].items()
    }, requests


def orders(requests, points, seed=0):
    """Ways to spread so many requests over so many points and what comes after: 100, and 1,000 in the long tier."""
    picked = list(itertools.combinations(range(requests + points), requests))
    most = 5 * settings().max_examples
    if len(picked) > most:
        picked = random.Random(seed).sample(picked, most)
    for places in picked:
        turns = [0] * (points + 1)
        for number, place in enumerate(places):
            turns[place - number] += 1
        yield turns


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", WRITES)
def test_in_whatever_order_requests_come_no_write_is_undone(name):
    wanted, requests = alone(WRITES[name])
    for turns in orders(requests, 14):
        assert Interleaved(WRITES[name], turns).run() == wanted, f"{name}: {turns}"
    without = [Interleaved(WRITES[name], turns).run(mend=False) for turns in orders(requests, 2)]
    assert any(rows != wanted for rows in without), "the job never came between"


@pytest.mark.hypothesis
def test_what_two_clients_write_to_one_row_at_once_is_one_or_the_other():
    theirs = [write("upsert", [row(1, "a")])], [write("upsert", [row(1, "b")])]
    left = set()
    for seed, turns in enumerate(orders(6, 14)):
        rows = Interleaved(theirs[0], turns, theirs[1], seed=seed).run()
        left.add(rows.pop(1)[1])
        assert {note for _, note in rows.values()} == {"old"}
    assert left == {"a", "b"}


def repair(database, *written):
    """Repair row 1, of which a job has written these contents."""
    job = Job(database)
    rows = [dict(each) for each in written]
    batch = Batch([1] * len(rows), np.float32([row.pop("vector") for row in rows]), rows)
    digests = {1: set(CONTENT.digests(batch))}
    return _Repair(job, HERE, database.intent_log, CONTENT, set()).run(digests, None, lambda: None)


@pytest.mark.parametrize("moment", [0, 1, 5])
def test_a_partial_update_builds_on_what_another_client_wrote_and_the_job_undid(moment):
    database = Database()
    mine, other, requests = client(database), client(database), itertools.count()
    old = dict(database.tables[HERE][1])

    def meanwhile(step):
        asked = isinstance(step, Ask) and step.method not in (
            "describe_collection",
            "get_server_version",
        )
        if asked and next(requests) == moment:
            drive(write("upsert", [row(1, "other")])(other), lambda each: answered(database, each))
            database.tables[HERE][1] = old
        return answered(database, step)

    drive(write("upsert", [{"id": 1, "note": "mine"}], partial_update=True)(mine), meanwhile)
    repair(database, old)
    left = database.tables[HERE][1]
    assert next(requests) > moment
    assert left["vector"] == [0.0, 1.0], "the other's write is lost"
    assert left["note"] == ("mine" if moment < 5 else "other")


def test_a_later_write_of_a_client_that_notes_nothing_is_kept():
    """Point 6: v = 100 was noted and written, then another client wrote v = 200, or deleted the row, or
    inserted a deleted one again."""
    for before, after in (
        (row(1, "100"), row(1, "200")),
        (row(1, "100"), None),
        (None, row(1, "inserted again")),
    ):
        database = Database()
        job, operations = Job(database), client(database)
        batch = job.get(HERE, [1], "vector")
        make = write("upsert", [before]) if before else delete([1])
        drive(make(operations), lambda step, database=database: answered(database, step))
        row_writer(job, None).rewrite(batch, ["bias"], None)
        database.tables[HERE].pop(1, None)
        if after:
            database.tables[HERE][1] = dict(after)
        assert repair(database, {**batch.rows[0], "vector": batch.vectors[0].tolist()}) == 0
        assert database.tables[HERE].get(1) == after


@pytest.mark.parametrize("after", [row(1, "200"), None], ids=["update", "insert again"])
def test_a_later_write_that_the_job_has_read_is_kept(after):
    """v = 100 was noted and written, then another client wrote v = 200; then the job read and wrote the row.
    Or it was deleted, and inserted again."""
    database = Database()
    job, operations = Job(database), client(database)
    make = write("upsert", [row(1, "100")]) if after else delete([1])
    drive(make(operations), lambda step: answered(database, step))
    database.tables[HERE][1] = dict(after or row(1, "again"))
    writer = row_writer(job, database.intent_log, visible=0.1)
    writer.rewrite(writer.read([1], None), ["bias"], None)
    assert writer.repaired == 0
    assert database.tables[HERE][1]["note"] == ("200" if after else "again")


def test_a_client_between_its_note_and_its_write_is_waited_for():
    database = Database()
    job, operations, looks = Job(database), client(database), itertools.count()
    late = []

    def held_up(step):
        if isinstance(step, Ask) and (step.method, step.args[0]) == ("upsert", HERE):
            late.append(step)
            return {"ids": [1]}
        return answered(database, step)

    drive(write("upsert", [row(1, "new")])(operations), held_up)

    def arrive():
        if next(looks) == 8:
            database.before = lambda: None
            answered(database, late[0])

    database.before = arrive
    writer = row_writer(job, database.intent_log)
    assert writer.read([1], None).rows[0]["note"] == "new"


def test_a_row_that_is_deleted_twice_stays_deleted():
    """A second deletion is another note than the first."""
    database = Database()
    job, operations = Job(database), client(database)
    writer = row_writer(job, database.intent_log)
    for _ in range(2):
        database.tables[HERE][1] = row(1, "there")
        batch = job.get(HERE, [1], "vector")
        drive(delete([1])(operations), lambda step: answered(database, step))
        writer.rewrite(batch, ["bias"], None)
        assert 1 not in database.tables[HERE]


def test_a_row_that_never_rests_is_reported():
    database = Database()
    operations, notes = client(database), itertools.count()
    old = dict(database.tables[HERE][1])

    def change():
        # A write that is noted and that the job then comes before.
        database.before = lambda: None
        note = f"n{next(notes)}"
        drive(write("upsert", [row(1, note)])(operations), lambda step: answered(database, step))
        database.tables[HERE][1] = dict(old)
        database.before = change

    database.before = change
    with pytest.raises(NotCaughtUp, match=r"rows 1 of 'here' change faster"):
        repair(database, old)


# -- what clients ask ---------------------------------------------------------------------------------------


def requested(database, operations, make):
    database.asked.clear()
    outcome = drive(make(operations), lambda step: answered(database, step))
    return outcome, list(database.asked)


def test_a_write_is_noted_before_it_is_made():
    database = Database()
    operations = client(database)
    told, asked = requested(database, operations, write("insert", [row(9, "new")]))
    assert told == {"ids": [9]}
    # Once for a cached state, the log must point back.
    checks = [("describe_collection", JOURNAL), ("describe_collection", ROWS)]
    assert asked == [*checks, ("insert", ROWS), ("upsert", JOURNAL), ("insert", HERE)]
    _, asked = requested(database, operations, delete([9]))
    assert asked == [("upsert", JOURNAL), ("delete", HERE)]
    told, asked = requested(database, operations, delete(filter='note == "old"'))
    assert told == {"delete_count": 4}
    assert [each for each in asked if each[0] != "query"] == [("upsert", JOURNAL), ("delete", HERE)]
    told, asked = requested(database, operations, delete(filter='note == "old"'))
    assert told["delete_count"] == 0
    assert {method for method, _ in asked} == {"query"}


def test_a_collection_that_announces_nothing_is_asked_what_it_was_asked_ever():
    database = Database()
    database.announced = False
    operations = client(database)
    for make, method in ((write("upsert", [row(1, "new")]), "upsert"), (delete([1]), "delete")):
        assert requested(database, operations, make)[1] == [(method, HERE)]


def test_keys_that_the_server_makes_are_of_rows_that_no_job_has_read():
    database = Database(auto_id=True)
    operations = client(database)
    assert requested(database, operations, write("insert", [row(9, "new")]))[1] == [
        ("insert", HERE)
    ]
    assert ("upsert", JOURNAL) in requested(database, operations, write("upsert", [row(9, "n")]))[1]


def test_a_key_may_lie_in_several_partitions():
    database = Database(by_partition=True)
    operations = client(database)
    requested(database, operations, delete([1]))
    noted = sorted((each["key"], each["partition"]) for each in database.tables[JOURNAL].values())
    assert noted == [(1, "_default"), (1, "other")]
    requested(
        database,
        operations,
        lambda each: each.dual_writes.delete(Deletion(HERE, [2], partition_name="other")),
    )
    assert len(database.tables[JOURNAL]) == 3


# -- clients that know less than is so --------------------------------------------------------------------


def test_a_journal_that_is_gone_is_asked_after():
    database = Database()
    operations = client(database)
    del database.tables[ROWS], database.tables[JOURNAL]
    database.announced = False
    for make in (write("upsert", [row(1, "new")]), delete([2]), delete(filter="id == 3")):
        operations = client(Database())
        requested(database, operations, make)
    assert database.tables[HERE].keys() == {0, 1}
    assert database.tables[HERE][1]["note"] == "new"


@pytest.mark.parametrize("name", [name for name in WRITES if len(WRITES[name]) == 1])
def test_what_cannot_be_noted_is_not_written(name):
    database = Database()
    operations = client(database)
    before = json.dumps(database.tables[HERE])
    database.failing["upsert", JOURNAL] = MilvusException(message="read only")
    with pytest.raises(
        WriteIntentFailed, match=rf"nothing was written to 'here'.*'{JOURNAL}'.*read only"
    ):
        requested(database, operations, WRITES[name][0])
    del database.tables[JOURNAL]
    database.failing.clear()
    with pytest.raises(WriteIntentFailed, match="can't find collection"):
        requested(database, operations, WRITES[name][0])
    assert json.dumps(database.tables[HERE]) == before


def test_rows_that_pymilvus_refuses_are_refused_in_its_words():
    database = Database()
    refusal = ParamError(message="Insert missed an field `note`")
    database.failing["insert", ROWS] = refusal
    with pytest.raises(ParamError, match="missed an field") as raised:
        requested(database, client(database), write("insert", [row(9, "new")]))
    assert raised.value is refusal
    assert 9 not in database.tables[HERE]


@pytest.mark.parametrize("name", ["insert", "update", "delete", "delete by filter"])
def test_a_write_that_took_so_long_that_a_job_has_begun_is_noted_and_made_again(name):
    make, wanted = WRITES[name], alone(WRITES[name])[0]
    database = Database()
    database.announced = False
    operations = client(database, state_ttl=0.0)
    old = json.loads(json.dumps(database.tables[HERE]))

    def meanwhile(step):
        outcome = answered(database, step)
        method, name = (step.method, step.args[0]) if isinstance(step, Ask) else ("", "")
        is_write = method in ("insert", "upsert", "delete") and name == HERE
        if is_write and not database.announced:
            database.announced = True
            database.tables[HERE] = {int(key): row for key, row in old.items()}
        return outcome

    drive(make[0](operations), meanwhile)
    held = {key: (row["vector"], row["note"]) for key, row in database.tables[HERE].items()}
    assert held == wanted
    assert {each["key"] for each in database.tables[JOURNAL].values()} >= {1}


def test_what_pymilvus_remembers_of_a_journal_is_not_believed_of_the_next_of_its_name():
    database = Database()
    operations = client(database)
    database.intent_log = WriteIntentLog(collection=JOURNAL, made="later")
    steps = []
    operations.states.forget(HERE)
    drive(
        operations.states.cached_state(HERE),
        lambda step: steps.append(step) or answered(database, step),
    )
    assert [each.collection for each in steps if isinstance(each, LearnSchema)] == [JOURNAL, ROWS]


def test_what_is_known_is_as_old_as_the_question(monkeypatch):
    database, now = Database(), [0.0]
    monkeypatch.setattr("milvus_hubness.milvus.client.state_cache.time.monotonic", lambda: now[0])
    operations = Operations(None, 5.0, 1 << 20)

    def slowly(step):
        outcome = answered(database, step)
        now[0] += 4.0
        return outcome

    drive(operations.states.cached_state(HERE), slowly)
    now[0] = 5.5
    assert requested(database, operations, delete([1]))[1][0] == ("describe_collection", HERE)


def test_what_would_be_added_twice_is_reported_instead():
    database = Database()
    database.announced = False
    operations = client(database, state_ttl=0.0)

    def meanwhile(step):
        if isinstance(step, Ask) and step.method == "upsert":
            database.announced = True
            return {"ids": [1]}
        return answered(database, step)

    make = write("upsert", [{"id": 1, "tags": ["x"]}], field_ops={"tags": "array_append"})
    with pytest.raises(WriteIntentFailed, match="read the rows again"):
        drive(make(operations), meanwhile)
