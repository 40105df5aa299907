"""Rows written while a job rewrites them all: no write is lost, and no deleted row is there again."""

import asyncio
import contextlib
import itertools
import threading
import time

import numpy as np
import pytest
from pymilvus import DataType, MilvusClient
from pymilvus.exceptions import MilvusException

from milvus_hubness import (
    NNN,
    HubnessClient,
    QueryBank,
    StoreError,
    enable,
    plan_enable,
)
from milvus_hubness.errors import Cancelled, LeaseLost, WriteIntentFailed
from milvus_hubness.jobs.common import row_writer
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.common.lease_records import LeasePolicy
from milvus_hubness.jobs.common.row_writer import rewriting
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.jobs.store.records import WRITE_INTENTS_PROPERTY, WriteIntentLog
from tests.support.async_clients import opened
from tests.support.galleries import all_keys, plain_collection, rich_rows, rich_schema, vectors
from tests.support.write_intents import BANK, DIM, ITEMS, K, Written

AN_HOUR = 3_600.0
LITE = pytest.mark.lite_only


@pytest.fixture(scope="module")
def shared(shared_lite):
    return Written(shared_lite)


@pytest.fixture
def written(shared):
    """What both collections hold is the same again after each test."""
    yield shared
    shared.assert_equal()


def writes(written):
    """What applications do, each with whether a job that comes between undoes it."""
    both, rows = written.both, written.rows
    yield True, lambda: both("upsert", data=rows([3, 100, 4]))
    yield True, lambda: both("upsert", data=rows([5])[0])
    yield False, lambda: both("insert", data=rows([101, 102]))
    yield True, lambda: both("delete", ids=[6, 7, 9_999])
    yield True, lambda: both("delete", ids=8)
    yield True, lambda: both("delete", filter="group == 2 and id < 31")
    yield False, lambda: both("delete", filter="group == 77")
    yield True, lambda: (both("delete", ids=[9]), both("insert", data=rows([9])))
    if written.backend.is_lite:
        in_part = {"partial_update": True}
        yield (
            True,
            lambda: both(
                "upsert", data=[{"id": 10, "note": "x"}, {"id": 11, "note": "y"}], **in_part
            ),
        )
        yield True, lambda: both("upsert", data=[{"id": 10, "group": 99}], **in_part)
        yield True, lambda: both("upsert", data=rows([13, 103]), **in_part)


def test_a_job_undoes_nothing_that_clients_write_meanwhile(backend):
    written = Written(backend, "COSINE")
    with written.rewriting() as writer:
        assert written.rewrite(writer) == 0
        for is_undone, write in writes(written):
            assert (written.rewrite(writer, write) > 0) == is_undone
            written.assert_equal()
            written.rewrite(writer)
            written.assert_equal()
    assert written.announced() is None
    assert written.intent_logs() == written.empty
    written.both("upsert", data=written.rows([3]))
    written.assert_equal()


def test_without_the_log_it_would(written):
    with written.rewriting() as writer:
        writer._intent_log = None
        written.rewrite(writer, lambda: written.both("delete", ids=[30]))
    with pytest.raises(AssertionError):
        written.assert_equal()
    written.client.delete(written.name, ids=[30])


class Rich(Written):
    """Rows with every kind of field, and awkward texts for keys."""

    field, key_field = "vec", "pk"

    def make(self):
        schema = rich_schema(self.plain, "text")
        if self.backend.is_lite:
            schema.add_field("sparse", DataType.SPARSE_FLOAT_VECTOR)
            schema.add_field("perhaps", DataType.VARCHAR, max_length=20, nullable=True)
            schema.add_field("usually", DataType.INT64, default_value=7)
        self.bank = vectors(self.rng, BANK, 32)
        index = MilvusClient.prepare_index_params("vec", index_type="FLAT", metric_type=self.metric)
        sparse = MilvusClient.prepare_index_params()
        if self.backend.is_lite:
            for each in (index, sparse):
                each.add_index("sparse", index_type="SPARSE_INVERTED_INDEX", metric_type="IP")
        self.plain.create_collection(
            self.twin,
            schema=schema,
            index_params=index,
            consistency_level="Strong",
            num_partitions=4,
        )
        self.create(schema, num_partitions=4)
        if self.backend.is_lite:
            self.plain.create_index(self.name, sparse)
            self.plain.load_collection(self.name)
        self.both("insert", data=self.rich(40))

    def rich(self, count):
        """Rows of the first so many keys, all of them new."""
        rows = rich_rows(self.rng, count, "text")
        for i, row in enumerate(rows if self.backend.is_lite else ()):
            row["sparse"] = {i: 1.0, i + 5: float(self.rng.random())}
            row |= {"perhaps": f"p{i}" if i % 2 else None}
            row |= {"usually": i} if i % 3 else {}
        return rows


def test_rows_of_every_kind_are_put_right(backend):
    written = Rich(backend)
    rows = written.rich(42)
    with written.rewriting() as writer:
        updated = [*rows[:12], *rows[40:]]
        for row in updated:
            row["free"] = {"any": "new"}
        assert written.rewrite(writer, lambda: written.both("upsert", data=updated)) == 12
        gone = [row["pk"] for row in rows[4:9]]
        where = "pk in [" + ", ".join(map(quoted, gone)) + "]"
        assert written.rewrite(writer, lambda: written.both("delete", filter=where)) == 5
        if backend.is_lite:
            change = [{"pk": rows[0]["pk"], "single": 2.5}, {"pk": rows[20]["pk"], "single": 3.5}]
            assert written.rewrite(
                writer, lambda: written.both("upsert", data=change, partial_update=True)
            ) in (1, 2)
        written.assert_equal()


def quoted(text):
    """As Milvus's filters have it."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(escapes.get(letter, letter) for letter in text) + '"'


class Named(Written):
    """Rows in two partitions, some keys in both."""

    def make(self):
        super().make()
        for name in (self.name, self.twin):
            self.plain.create_partition(name, "other")
        self.both("insert", data=self.rows([3, 4, 500]), partition_name="other")

    def held(self, client, name):
        rows = {}
        for partition in ("_default", "other"):
            options = {"output_fields": ["*"], "limit": 1_000, "consistency_level": "Strong"}
            for row in client.query(name, filter="", partition_names=[partition], **options):
                rows[partition, row["id"]] = row
        return rows, len(rows)


def test_a_key_in_several_partitions_is_several_rows_on_a_server(served):
    written = Named(served)

    def rewrite(writer, meanwhile):
        before = writer.repaired
        other = all_keys(written.store, written.name, "other")
        batch = written.store.get(written.name, other, "vector", partition="other")
        written.rewrite(writer, meanwhile, "_default")
        writer.rewrite(batch, ["vector"], "other")
        return writer.repaired - before

    with written.rewriting() as writer:
        change = written.rows([3])
        upsert = {"data": change, "partition_name": "other"}
        assert rewrite(writer, lambda: written.both("upsert", **upsert)) == 1
        assert (
            rewrite(writer, lambda: written.both("delete", ids=[3], partition_name="_default")) == 1
        )
        assert rewrite(writer, lambda: written.both("delete", ids=[4])) == 2
        assert rewrite(writer, lambda: written.both("delete", filter="id >= 50")) == 11
        written.assert_equal()


class InSideCollection(Written):
    """Biases in a side collection."""

    def make(self):
        self.backend.made += [f"{self.name}__bias_a", f"{self.name}__bias_b"]
        for name in (self.twin, self.name):
            plain_collection(self.plain, name, self.items, self.metric)
        bank = QueryBank(self.bank)
        plan = plan_enable(self.store, self.name, bank, estimator=NNN(K), verdict="warn")
        enable(self.store, plan, client_ttl=0.0)


def test_where_no_row_is_rewritten_there_is_no_journal(lite):
    written = InSideCollection(lite)
    with written.rewriting(client_ttl=0.0):
        assert written.announced() is None
        written.both("upsert", data=written.rows([3]))
        assert written.store.records(LEDGER, f"batches/{written.name}") == []
    written.assert_equal()


def test_tasks_note_what_they_write(written):

    rows = written.rows([31])
    written.plain.upsert(written.twin, rows)
    written.plain.delete(written.twin, filter="id in [32, 33]")

    async def write():
        async with opened(written.backend) as client:
            await client.upsert(written.name, rows)
            await client.delete(written.name, filter="id in [32, 33]")

    with written.rewriting() as writer:
        assert written.rewrite(writer, lambda: asyncio.run(write())) == 3


def test_users_see_nothing_of_it(written):
    before = written.client.describe_collection(written.name)
    with written.rewriting():
        during = written.client.describe_collection(written.name)
        assert during["properties"] == before["properties"]
        assert during["fields"] == before["fields"]


# -- jobs that do not end well ------------------------------------------------------------------------------


def killed(written):
    """The writer of a job that is killed at work: its lease expires."""
    info = written.store.info(written.name)
    lease = Lease(written.store, written.name, policy=LeasePolicy(0.01, 0.0, 0.0))
    lease.__enter__()
    lease._over.set()
    return rewriting(lease, info, info.state, client_ttl=0.0).__enter__()


def abandoned(written):
    """A job that is killed between its write and its look for notes."""
    writer = killed(written)
    keys = all_keys(written.store, written.name)
    batch = written.store.get(written.name, keys, written.field)
    written.both("upsert", data=written.rows([3]))
    written.both("delete", ids=[4])

    def die(*args, **options):
        raise Failure

    writer._lease.store.notes = die
    with pytest.raises(Failure):
        writer.rewrite(batch, [written.field], None)


def test_the_next_job_puts_right_what_a_killed_one_undid(backend):
    written = Written(backend)
    abandoned(written)
    first = written.announced()
    assert first is not None
    written.both("upsert", data=written.rows([5]))
    with written.rewriting() as writer:
        written.assert_equal()
        assert written.announced() not in (None, first)
        assert written.rewrite(writer, lambda: written.both("upsert", data=written.rows([6]))) == 1
        written.assert_equal()
    assert written.intent_logs() == written.empty


def test_what_a_killed_job_left_unannounced_is_never_done_again(lite):
    written = Written(lite)
    abandoned(written)
    written.store.write_property(written.name, WRITE_INTENTS_PROPERTY, None)
    written.both("upsert", data=written.rows([3, 4]))
    with written.rewriting():
        written.assert_equal()
    assert written.intent_logs() == written.empty


def test_a_killed_job_whose_journal_was_dropped_holds_up_nobody(lite):
    written = Written(lite)
    killed(written)
    for name in written.intent_logs():
        written.plain.drop_collection(name)
    with pytest.raises(WriteIntentFailed, match="nothing was written") as raised:
        written.client.upsert(written.name, written.rows([3]))
    assert isinstance(raised.value, MilvusException)
    assert isinstance(raised.value, StoreError)
    written.assert_equal()
    with written.rewriting():
        written.both("upsert", data=written.rows([3]))
    written.assert_equal()


class Failure(Exception):
    pass


def test_a_job_that_fails_puts_right_what_it_undid(written):

    def fail(*args, **options):
        raise Failure

    def work():
        with written.rewriting() as writer:
            store, notes = writer._lease.store, written.store.notes
            store.notes = fail
            try:
                written.rewrite(writer, lambda: written.both("delete", ids=[34]))
            finally:
                store.notes = notes

    with pytest.raises(Failure):
        work()
    written.assert_equal()
    assert written.announced() is None
    assert written.intent_logs() == written.empty


def test_a_job_that_has_lost_its_lease_leaves_the_journal_to_the_next(written):

    def lose():
        with written.rewriting():
            raise LeaseLost("another process has it")

    with pytest.raises(LeaseLost):
        lose()
    assert written.announced() is not None
    with written.rewriting():
        pass
    assert written.intent_logs() == written.empty


def test_a_job_that_is_stopped_waits_for_nobody(written):
    stop = threading.Event()
    stop.set()

    def begin():
        with written.rewriting(client_ttl=AN_HOUR, stop=stop):
            pytest.fail("it went on")

    with pytest.raises(Cancelled):
        begin()
    assert written.announced() is None
    assert written.intent_logs() == written.empty


def test_no_row_is_read_before_every_client_has_heard(written, monkeypatch):
    old = written.backend.hubness_client(state_ttl=AN_HOUR)
    old.get(written.name, [1])
    waits = []

    def wait(awaited, seconds, stop):
        waits.append((seconds, written.announced() is not None))
        old.query_iterator(written.name)  # reads the state, as if the time had passed

    monkeypatch.setattr(row_writer, "wait_seconds", wait)
    rows = written.rows([35])
    written.plain.upsert(written.twin, rows)
    with written.rewriting(client_ttl=AN_HOUR) as writer:
        assert waits == [(AN_HOUR, True)]
        assert written.rewrite(writer, lambda: old.upsert(written.name, rows)) == 1


# -- clients that know less than is so -------------------------------------------------------------------


@pytest.mark.beyond_contract
def test_a_client_that_still_notes_when_nobody_asks_it_to_writes_on(backend):
    written = Written(backend)
    old = backend.hubness_client(state_ttl=AN_HOUR)
    with written.rewriting():
        old.upsert(written.name, written.rows([3])[0])
    written.client = old
    written.plain.upsert(written.twin, old.get(written.name, [3]))
    written.both("upsert", data=written.rows([3]))
    with written.rewriting() as writer:
        # It remembers another, which is gone.
        announced = written.announced()
        gone = WriteIntentLog(collection=f"{written.name}__write_intents_00000000", made="long ago")
        written.store.write_property(written.name, WRITE_INTENTS_PROPERTY, gone)
        old.query_iterator(written.name)
        written.store.write_property(written.name, WRITE_INTENTS_PROPERTY, announced)
        assert written.rewrite(writer, lambda: written.both("delete", ids=[4])) == 1
    written.assert_equal()


# -- write-intent logs stay from one job to the next
# -----------------------------------------------------------------


def marked(written):
    """Which of the write-intent logs' collections are those that were marked, and not others of their names."""
    described = {name: written.plain.describe_collection(name) for name in written.intent_logs()}
    return {name for name, each in described.items() if each["properties"].get("mark")}


def mark(written):
    for name in written.intent_logs():
        written.plain.alter_collection_properties(name, {"mark": "1"})


@pytest.mark.beyond_contract
def test_the_next_job_takes_the_same_journal_and_none_of_its_old_notes(backend):
    written = Written(backend)
    late = backend.hubness_client(state_ttl=AN_HOUR)
    with written.rewriting():
        mark(written)
        late.delete(written.name, ids=[3])
        late.upsert(written.name, written.rows([4, 5]))
    assert written.intent_logs() == written.empty
    # It has not heard that nobody reads them.
    late.upsert(written.name, written.rows([4, 5]))
    late.delete(written.name, ids=[5])
    assert written.intent_logs() == written.log_holds(2)
    written.both("upsert", data=written.rows([3, 4, 5]))
    with written.rewriting() as writer:
        assert marked(written) == written.intent_logs().keys()
        assert written.rewrite(writer, keys=[3, 4, 5]) == 0
        written.assert_equal()
        assert written.rewrite(writer, lambda: written.both("delete", ids=[4])) == 1
    written.assert_equal()
    assert written.intent_logs() == written.empty


def test_a_revived_job_takes_away_no_note_that_is_for_its_successor(lite):
    written = Written(lite)
    with written.rewriting():
        former = written.announced()
    with written.rewriting() as writer:
        written.both("delete", ids=[3])
        written.store._forget_notes(former, before=former.made + "~")
        assert written.rewrite(writer, lambda: written.both("delete", ids=[4])) == 1
        assert written.intent_logs()[written.announced().collection] == 2


def test_a_call_that_drops_a_journal_late_drops_none_that_another_job_uses(lite):
    written = Written(lite)
    with written.rewriting():
        former = written.announced()
    with contextlib.ExitStack() as successor:
        jobs = []

        def is_taken_over():
            """After this check of the lease, the former job sends its call."""
            jobs.append(successor.enter_context(written.rewriting()))
            written.both("delete", ids=[3])

        written.store.drop_intent_log(former, is_taken_over)
        assert written.announced().collection != former.collection
        assert written.rewrite(jobs[0], lambda: written.both("delete", ids=[4])) == 1
    written.assert_equal()


def test_a_collection_of_another_schema_gets_another_journal(lite):
    written = Written(lite)
    with written.rewriting():
        mark(written)
    written.client.drop_collection(written.name)
    schema = MilvusClient.create_schema(enable_dynamic_field=True)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
    schema.add_field("group", DataType.INT64)
    schema.add_field("size", DataType.DOUBLE)
    written.create(schema)
    rows = [{**row, "size": 0.5} for row in written.rows([1, 2])]
    written.client.insert(written.name, rows)
    with written.rewriting() as writer:
        assert marked(written) == set()
        write = {"size": 1.5, **written.rows([2])[0]}
        assert written.rewrite(writer, lambda: written.client.upsert(written.name, write)) == 1
    assert written.client.get(written.name, [2])[0]["size"] == 1.5


# -- many writers --------------------------------------------------------------------------------------------


def beside_writers(written, jobs):
    """So many jobs that rewrite all rows, a batch at a time, and three writers with keys of their own."""
    stop, failures, wanted = threading.Event(), [], {}
    stamps = itertools.count()

    def write(number):
        client, rng = (
            written.backend.client(HubnessClient, state_ttl=0.2),
            np.random.default_rng(number),
        )
        mine = np.arange(number, ITEMS, 3)
        kinds = ["upsert", "delete", "filter"] + ["in part"] * written.backend.is_lite
        rows = {int(key): f"n{key}" for key in mine}
        try:
            while not stop.is_set():
                keys = rng.choice(mine, 4, replace=False).tolist()
                kind = rng.choice(kinds)
                note = f"w{next(stamps)}"
                if kind == "upsert":
                    client.upsert(
                        written.name, [{**row, "note": note} for row in written.rows(keys)]
                    )
                    rows |= dict.fromkeys(keys, note)
                elif kind == "in part":
                    there = [key for key in keys if key in rows]
                    change = [{"id": key, "note": note} for key in there]
                    if there:
                        client.upsert(written.name, change, partial_update=True)
                    rows |= dict.fromkeys(there, note)
                else:
                    how = {"ids": keys[:2]} if kind == "delete" else {"filter": f"id in {keys[:2]}"}
                    client.delete(written.name, **how)
                    for key in keys[:2]:
                        rows.pop(key, None)
        except BaseException as error:
            failures.append(error)
        wanted.update(rows)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    repaired = 0
    for _ in range(jobs):
        with written.rewriting(client_ttl=0.4) as writer:
            for first in range(0, ITEMS, 10):
                keys = list(range(first, first + 10))
                repaired += written.rewrite(writer, lambda: time.sleep(0.05), keys=keys)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failures, repr([str(each) for each in failures])
    held, count = written.held(written.client, written.name)
    assert {key: row["note"] for key, row in held.items()} == wanted
    assert count == len(wanted)
    assert repaired, "the job never came between"


def test_a_row_that_a_job_takes_away_for_a_moment_is_updated_in_part(lite):
    """As where it does a deletion again that is over by now, and then sees the later note."""
    written = Written(lite)
    with written.rewriting():
        written.client.upsert(written.name, written.rows([2]))
        [whole] = written.store.client.get(written.name, [2])
        written.store.client.delete(written.name, ids=[2])
        revert = threading.Timer(0.3, written.store.client.upsert, (written.name, [whole]))
        revert.start()
        written.client.upsert(written.name, [{"id": 2, "note": "in part"}], partial_update=True)
        revert.join()
    assert written.client.get(written.name, [2])[0]["note"] == "in part"


def test_writers_go_on_while_rows_are_rewritten(lite):
    beside_writers(Written(lite), 2)


@pytest.mark.long
def test_writers_go_on_for_long(backend):
    beside_writers(Written(backend), 4)
