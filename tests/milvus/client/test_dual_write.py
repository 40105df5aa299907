"""What writes to written to the copy too collections ask of the database, step by step, without one."""

import itertools

import numpy as np
import pytest
from pymilvus.exceptions import MilvusException

from milvus_hubness import NNN, DualWriteFailed, QueryBank
from milvus_hubness.clients.steps import Ask, Compute, Pause, drive
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import BiasSlots
from milvus_hubness.correction.fitted import initial_state
from milvus_hubness.correction.overrides import NONE
from milvus_hubness.correction.state import BankReference
from milvus_hubness.jobs.store.records import DUAL_WRITE_PROPERTY, DualWrite
from milvus_hubness.milvus.client.messages import Write
from milvus_hubness.milvus.client.operations import Operations
from milvus_hubness.milvus.client.steps import InStore, LearnSchema, LoadBank
from tests.support.ledgers import MIGRATION, MigrationsOnly

ROW = {"id": 1, "vector": [0.0, 1.0]}
HERE, THERE = "here", "there"
NOT_LOADED = 101


class Database:
    """Answers steps of two plain collections, and keeps who was asked what."""

    def __init__(self, dual_write=None):
        self.dual_write, self.asked, self.failing = dual_write, [], 0
        self.operations = Operations(NONE, 3_600.0, 1 << 20)

    def answer(self, step):
        if isinstance(step, InStore):
            return step.work(MigrationsOnly(THERE, HERE))
        assert isinstance(step, Ask)
        name = step.args[0]
        self.asked.append((step.method, name))
        if step.method == "describe_collection":
            result = self.dual_write if name == HERE else None
            properties = {DUAL_WRITE_PROPERTY: result.model_dump_json()} if result else {}
            return {"fields": [{"name": "id", "is_primary": True}], "properties": properties}
        if name == THERE and self.failing:
            self.failing -= 1
            raise MilvusException(message="busy")
        return [] if step.method == "query" else {"ids": [1]}

    def insert(self):
        self.asked.clear()
        return drive(self.operations.dual_writes.write(Write("insert", HERE, [ROW])), self.answer)


def test_a_collection_without_a_mirror_is_asked_what_it_was_asked_ever():
    database = Database()
    database.insert()
    assert database.asked == [("describe_collection", HERE), ("insert", HERE)]
    database.insert()
    assert database.asked == [("insert", HERE)]


def test_the_mirror_gets_an_upsert_after_the_insert():
    database = Database(DualWrite(collection=THERE))
    database.insert()
    described = [("describe_collection", HERE), ("describe_collection", THERE)]
    assert database.asked == [described[0], ("insert", HERE), described[1], ("upsert", THERE)]
    assert database.insert() == {"ids": [1]}
    assert database.asked == [("insert", HERE), ("upsert", THERE)]


def test_a_mirror_that_came_while_a_write_was_under_way_gets_it_too():
    database = Database()
    database.insert()

    def answer(step):
        if isinstance(step, Ask) and step.method == "insert":
            database.dual_write = DualWrite(collection=THERE)
            database.operations.states.forget(HERE)
        return database.answer(step)

    database.asked.clear()
    drive(database.operations.dual_writes.write(Write("insert", HERE, [ROW])), answer)
    assert database.asked[-1] == ("upsert", THERE)
    assert [each for each in database.asked if each[0] == "insert"] == [("insert", HERE)]


def test_what_a_complete_mirror_refuses_once_it_is_asked_again():
    database = Database(DualWrite(collection=THERE, required=True))
    database.failing = 1
    assert database.insert() == {"ids": [1]}
    assert [each for each in database.asked if each[0] != "describe_collection"] == [
        ("insert", HERE),
        ("upsert", THERE),
        ("upsert", THERE),
    ]
    database.failing = 2
    with pytest.raises(DualWriteFailed, match="busy"):
        database.insert()
    assert database.asked.count(("insert", HERE)) == 1


def test_what_an_incomplete_mirror_refuses_is_left_to_the_migration():
    database = Database(DualWrite(collection=THERE))
    database.failing = 1
    assert database.insert() == {"ids": [1]}
    assert database.asked.count(("upsert", THERE)) == 1


@pytest.mark.parametrize(
    ("after", "held_back"), [("rename", 3), ("still closing", 3), ("nothing", 3)]
)
def test_a_read_waits_for_a_collection_that_has_just_got_its_name(after, held_back):
    """As Milvus Lite does it: closed before its name moves, and not loaded by its new name at first."""
    database = Database(None if after == "nothing" else DualWrite(collection=THERE))
    database.insert()
    waits, refusals = [], itertools.repeat(None, held_back)

    def answer(step):
        if isinstance(step, Pause):
            waits.append(step.seconds)
            return None
        if step.method == "get":
            if after == "rename":
                database.dual_write = None  # the name leads to another collection now
            for _ in refusals:
                raise MilvusException(NOT_LOADED, "Collection 'here' is in state 'released'")
            return [ROW]
        return database.answer(step)

    def read():
        get = Ask("get", (HERE, [1]), {"output_fields": None, "timeout": None})
        return drive(database.operations.reads.read(get), answer)

    if after == "nothing":
        with pytest.raises(MilvusException, match="released"):
            read()
    else:
        assert read() == [ROW]
        assert len(waits) >= held_back - 1


class Alias:
    """Answers steps about an alias over a plain collection and a copy of twice its width, after a move as a
    server does whose parts resolve names from caches of their own: `meets` says which collection each of the
    next writes reaches, `shows` which the next descriptions are of; afterwards both are where it leads to."""

    DIM = 8

    def __init__(self, leads_to, *, mirrored):
        bank = BankReference(
            collection="copy__bank", generation="ab", fingerprint="f", count=1, size=1
        )
        layout = Layout(self.DIM, "IP", BiasSlots(2))
        named = {"field": "vector", "suffix": "", "dtype": "float32", "source": "plain"}
        state = initial_state(layout, NNN(1), bank, **named).model_copy(
            update={"migration": MIGRATION}
        )
        self.width = state.codec.form.width
        self.properties = {"plain": {}, "copy": {state.property_name: state.to_json()}}
        if mirrored:
            for name, other in (("plain", "copy"), ("copy", "plain")):
                dual_write = DualWrite(collection=other, required=True)
                self.properties[name][DUAL_WRITE_PROPERTY] = dual_write.model_dump_json()
        self.leads_to, self.meets, self.shows, self.move = leads_to, [], [], None
        self.written = {"plain": [], "copy": []}
        self.operations = Operations(NONE, 3_600.0, 1 << 20)

    def answer(self, step):
        if isinstance(step, Pause | LearnSchema):
            return None
        if isinstance(step, LoadBank):
            return StoredBank(
                QueryBank(np.eye(1, self.DIM, dtype=np.float32)), np.zeros((1, 0), np.float32)
            )
        if isinstance(step, Compute):
            return step.work()
        if isinstance(step, InStore):
            return step.work(MigrationsOnly("plain", "copy"))
        name = step.args[0]
        if step.method == "describe_collection":
            if name == "alias":
                name = self.shows.pop(0) if self.shows else self.leads_to
            fields = [{"name": "id", "is_primary": True}]
            return {"collection_name": name, "fields": fields, "properties": self.properties[name]}
        if self.move:
            self.leads_to, self.meets, self.shows = self.move
            self.move = None
        if name == "alias":
            name = self.meets.pop(0) if self.meets else self.leads_to
        [sent], width = {len(row["vector"]) for row in step.args[1]}, self.DIM
        width = self.DIM if name == "plain" else self.width
        if sent != width:
            found = len(step.args[1]) * sent // width
            raise MilvusException(
                1100, f"the num_rows ({found}) of field (vector) is not equal to passed num_rows"
            )
        self.written[name] += [row["id"] for row in step.args[1]]
        return {"ids": [row["id"] for row in step.args[1]]}

    def write(self, method, keys):
        rows = [{"id": key, "vector": [1.0] * self.DIM} for key in keys]
        return drive(self.operations.dual_writes.write(Write(method, "alias", rows)), self.answer)


HERE_THERE = {
    "at once": ("", ""),
    "a write late": ("h", ""),
    "back once": ("th", ""),
    "back three times": ("thththt", ""),
    "a description late": ("", "h"),
    "both": ("tht", "h"),
}


@pytest.mark.parametrize("method", ["insert", "upsert"])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("caches", HERE_THERE)
@pytest.mark.parametrize(("here", "there"), [("plain", "copy"), ("copy", "plain")])
def test_rows_that_meet_another_collection_than_they_were_encoded_for_are_encoded_again(
    method, mirrored, caches, here, there
):
    """The alias moves between the encoding and the write. Rows for a corrected collection, or for one with
    dual writes, go to its real name. A late description shows no move."""
    alias = Alias(here, mirrored=mirrored)
    alias.write(method, [1])
    assert alias.written[here] == [1]
    names = {"h": here, "t": there}
    alias.move = (there, *([names[each] for each in late] for late in HERE_THERE[caches]))
    by_real_name = mirrored or here == "copy"
    if HERE_THERE[caches][1] and not by_real_name:
        with pytest.raises(MilvusException, match="num_rows"):
            alias.write(method, range(2, 12))
        alias.meets, alias.shows = [], []
    else:
        assert alias.write(method, range(2, 12)) == {"ids": list(range(2, 12))}
    assert alias.move is None
    if by_real_name:
        assert alias.written[here] == [*range(1, 12)]
        assert alias.meets == [{"h": here, "t": there}[each] for each in HERE_THERE[caches][0]]
        alias.meets, alias.shows = [], []
        alias.operations.states.forget()
    if mirrored:
        assert set(alias.written[there]) == {*range(1, 12)}
    elif not by_real_name and not HERE_THERE[caches][1]:
        assert {*alias.written[here], *alias.written[there]} >= {*range(2, 12)}
    alias.write(method, [12])
    assert 12 in alias.written[there]


@pytest.mark.parametrize("adds", [False, True])
def test_what_would_be_added_twice_is_reported_instead(adds):
    """The name has come to lead elsewhere while an upsert was under way, and nobody can say whether the rows
    there have it. Once more it does no harm, unless it changes fields by what they hold."""
    alias = Alias("copy", mirrored=False)
    alias.operations = Operations(NONE, 0.0, 1 << 20)
    alias.move = ("plain", [], [])
    rows = [{"id": 2, "vector": [1.0] * Alias.DIM, "tags": ["x"]}]
    options = {"field_ops": {"tags": "array_append"}} if adds else {}
    write = Write("upsert", "alias", rows, options=options)
    if adds:
        with pytest.raises(DualWriteFailed, match="read the rows again"):
            drive(alias.operations.dual_writes.write(write), alias.answer)
    else:
        drive(alias.operations.dual_writes.write(write), alias.answer)
    assert alias.written == {"copy": [2], "plain": [] if adds else [2]}


def test_what_is_known_is_as_old_as_the_question(monkeypatch):
    """A state expires so long after it was asked for, however long the answer took."""
    now = [0.0]
    monkeypatch.setattr("milvus_hubness.clients.states.time.monotonic", lambda: now[0])
    database = Database()
    database.operations = Operations(NONE, 5.0, 1 << 20)

    def slowly(step):
        outcome = database.answer(step)
        now[0] += 4.0
        return outcome

    drive(database.operations.states.cached_state(HERE), slowly)
    now[0] = 4.5
    database.insert()
    assert database.asked[0] == ("insert", HERE)
    now[0] = 5.5
    database.insert()
    assert database.asked[0] == ("describe_collection", HERE)


def test_a_write_that_is_made_again_has_each_key_once():
    """Newer Milvus refuses an upsert that has a key twice, which an insert may have."""
    rows = [{"id": 1, "n": 1}, {"id": 2, "n": 2}, {"id": 1, "n": 3}]
    again = Write("insert", "products", rows).as_upsert("id")
    assert (again.method, again.rows) == ("upsert", [{"id": 1, "n": 3}, {"id": 2, "n": 2}])
    made_by_server = [{"n": 1}, {"n": 1}]
    assert Write("insert", "products", made_by_server).as_upsert("id").rows == made_by_server
