"""What writes to mirrored collections ask of the database, step by step, without one."""

import itertools

import pytest
from pymilvus.exceptions import MilvusException

from milvus_hubness import MirrorFailed
from milvus_hubness.client.operations import Operations
from milvus_hubness.client.steps import Ask, Pause, drive
from milvus_hubness.state import MIRROR_PROPERTY, Mirror
from milvus_hubness.stores.milvus_rpc import COLLECTION_NOT_LOADED

ROW = {"id": 1, "vector": [0.0, 1.0]}
HERE, THERE = "here", "there"


class Database:
    """Answers steps of two plain collections, and keeps who was asked what."""

    def __init__(self, mirror=None):
        self.mirror, self.asked, self.failing = mirror, [], 0
        self.operations = Operations(None, 3_600.0, 1 << 20)

    def answer(self, step):
        assert isinstance(step, Ask)
        name = step.args[0]
        self.asked.append((step.method, name))
        if step.method == "describe_collection":
            told = self.mirror if name == HERE else None
            properties = {MIRROR_PROPERTY: told.model_dump_json()} if told else {}
            return {"fields": [{"name": "id", "is_primary": True}], "properties": properties}
        if name == THERE and self.failing:
            self.failing -= 1
            raise MilvusException(message="busy")
        return [] if step.method == "query" else {"ids": [1]}

    def insert(self):
        self.asked.clear()
        return drive(self.operations.write("insert", HERE, [ROW], None, "", "compute", {}), self.answer)


def test_a_collection_without_a_mirror_is_asked_what_it_was_asked_ever():
    database = Database()
    database.insert()
    assert database.asked == [("describe_collection", HERE), ("insert", HERE)]
    database.insert()
    assert database.asked == [("insert", HERE)]


def test_the_mirror_gets_an_upsert_after_the_insert():
    database = Database(Mirror(collection=THERE))
    database.insert()
    assert database.insert() == {"ids": [1]}
    assert database.asked == [("insert", HERE), ("upsert", THERE)]


def test_a_mirror_that_came_while_a_write_was_under_way_gets_it_too():
    database = Database()
    database.insert()

    def answer(step):
        if step.method == "insert":
            database.mirror = Mirror(collection=THERE)
            database.operations.forget(HERE)
        return database.answer(step)

    database.asked.clear()
    drive(database.operations.write("insert", HERE, [ROW], None, "", "compute", {}), answer)
    assert database.asked[-1] == ("upsert", THERE)
    assert [each for each in database.asked if each[0] == "insert"] == [("insert", HERE)]


def test_what_a_complete_mirror_refuses_once_it_is_asked_again():
    database = Database(Mirror(collection=THERE, required=True))
    database.failing = 1
    assert database.insert() == {"ids": [1]}
    assert [each for each in database.asked if each[0] != "describe_collection"] == [
        ("insert", HERE),
        ("upsert", THERE),
        ("upsert", THERE),
    ]
    database.failing = 2
    with pytest.raises(MirrorFailed, match="busy"):
        database.insert()
    assert database.asked.count(("insert", HERE)) == 1


def test_what_an_incomplete_mirror_refuses_is_left_to_the_migration():
    database = Database(Mirror(collection=THERE))
    database.failing = 1
    assert database.insert() == {"ids": [1]}
    assert database.asked.count(("upsert", THERE)) == 1


@pytest.mark.parametrize(("after", "held_back"), [("rename", 3), ("nothing", 3)])
def test_a_read_waits_for_a_collection_that_has_just_got_its_name(after, held_back):
    """As Milvus Lite does it: not loaded by its new name at first."""
    database = Database(Mirror(collection=THERE) if after == "rename" else None)
    database.insert()
    waits, refusals = [], itertools.repeat(None, held_back)

    def answer(step):
        if isinstance(step, Pause):
            waits.append(step.seconds)
            return None
        if step.method == "get":
            database.mirror = None  # the name leads to another collection now
            for _ in refusals:
                raise MilvusException(COLLECTION_NOT_LOADED, "Collection 'here' is in state 'released'")
            return [ROW]
        return database.answer(step)

    def read():
        return drive(database.operations.get(HERE, [1], None, None, None, {}), answer)

    if after == "nothing":
        with pytest.raises(MilvusException, match="released"):
            read()
    else:
        assert read() == [ROW]
        assert len(waits) == held_back - 1
