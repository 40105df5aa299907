"""Generations of biases beside the vectors: one is filled next to the one that searches read."""

import numpy as np
import pytest

from milvus_hubness import (
    NNN,
    Beside,
    QueryBank,
    Recipe,
    Sinkhorn,
    disable,
    enable,
    plan_correction,
    refresh,
    status,
)
from milvus_hubness.correction.state import OtherGeneration
from milvus_hubness.errors import EmptyCollection, InvalidInput
from milvus_hubness.jobs.beside.entries import Entries
from milvus_hubness.milvus.client.writes import Writes
from qdrant_hubness.client.writes import Writing
from tests.support.beside import ALPHA, AN_HOUR, DIM, ITEMS, CorrectedBeside, K, take_back
from tests.support.databases import OnMilvus, write_state
from tests.support.galleries import vectors


@pytest.fixture
def beside(database):
    return CorrectedBeside(database)


def test_refreshes_alternate_between_two_slots(beside):
    first = beside.state.profile
    beside.assert_found(beside.old)
    for number, bank in enumerate([beside.new, beside.old, beside.new], 2):
        beside.refreshed(bank)
        profile = beside.state.profile
        assert (profile.slot, profile.epoch) == ((first.slot + number - 1) % 2, number)
        assert beside.state.other.use == "former"
        beside.assert_found(bank)
    assert status(beside.store, beside.name).pending == 0


def test_searches_read_the_old_generation_until_the_new_one_is_whole(beside, monkeypatch):
    seen = []
    repair = Entries.repair

    def searched(entries, *args):
        repair(entries, *args)
        beside.assert_found(beside.old)
        seen.append(entries.state.filling.epoch)

    monkeypatch.setattr(Entries, "repair", searched)
    beside.refreshed()
    assert seen
    assert set(seen) == {2}
    beside.assert_found(beside.new)


@pytest.mark.parametrize("moment", ["before the read", "before the write", "after the write"])
@pytest.mark.parametrize("writer", ["ours", "plain"])
def test_a_row_that_changes_while_a_generation_is_filled_gets_the_bias_of_its_vector(
    beside, monkeypatch, writer, moment
):
    changed = []
    vector = vectors(beside.rng, 1, DIM)[0]

    def change():
        if not changed:
            changed.append(3)
            if writer == "ours":
                beside.write(3, vector)
            else:
                row = {"id": beside.keys[3], "vector": vector.tolist(), "group": 1}
                beside.database.put(beside.name, [row])
                beside.items[3] = vector

    read, put = Entries.read, Entries.put

    def around_put(self, *args):
        if moment == "before the write":
            change()
        count = put(self, *args)
        if moment == "after the write":
            change()
        return count

    def before_read(self, *args):
        if moment == "before the read":
            change()
        return read(self, *args)

    monkeypatch.setattr(Entries, "put", around_put)
    monkeypatch.setattr(Entries, "read", before_read)
    beside.refreshed()
    assert changed == [3]
    beside.assert_found(beside.new)


def announced(beside):
    """The state of a refresh that has begun, and waits."""
    reference, _ = beside.store.save_bank(
        beside.state.profile.bank.collection,
        beside.store.load_bank(beside.state.profile.bank),
        "IP",
    )
    profile = beside.state.profile
    change = {"slot": 1 - profile.slot, "epoch": 7, "bank": reference}
    other = OtherGeneration(use="filling", profile=profile.model_copy(update=change))
    state = beside.state.model_copy(update={"other": other})
    write_state(beside.store, beside.name, state)
    return state


def test_a_late_write_for_an_abandoned_generation_is_never_read(beside):
    """A client knows of a refresh that was killed; another one fills the same slot by a higher number."""
    announced(beside)
    late = beside.database.application(AN_HOUR)
    late.search(beside.name, data=[beside.queries[0]], limit=1)
    beside.refreshed()
    assert beside.state.profile.epoch == 8
    beside.assert_found(beside.new)

    vector = vectors(beside.rng, 1, DIM)[0]
    beside.write(3, vector, late)
    # Its entry has the number of the abandoned generation: the row counts as one without a bias.
    beside.assert_found(beside.new, without=[3])
    assert status(beside.store, beside.name).pending == 1
    refresh(beside.store, beside.name, client_ttl=0.0)
    beside.assert_found(beside.new)


def given_up(beside):
    """A refresh is stopped as it begins, and taken back."""
    put = Entries.put

    def killed(entries, *args):
        put(entries, *args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Entries, "put", killed)
        with pytest.raises(KeyboardInterrupt):
            beside.refreshed(vectors(beside.rng, 35, DIM))
    assert beside.state.filling is not None
    knows_of_it = beside.database.application(AN_HOUR)
    # A write, so that it has read the bank too.
    beside.write(5, vectors(beside.rng, 1, DIM)[0], knows_of_it)
    take_back(beside)
    assert beside.state.other is None
    beside.refreshed()
    return knows_of_it


def enabled_again(beside):
    """The correction is taken off, and put on again with another bank."""
    knows_the_first = beside.database.application(AN_HOUR)
    beside.write(5, vectors(beside.rng, 1, DIM)[0], knows_the_first)
    disable(beside.store, beside.name)
    recipe = Recipe(QueryBank(beside.new), estimator=NNN(K, ALPHA))
    enable(
        beside.store, plan_correction(beside.store, beside.name, recipe, Beside()), client_ttl=0.0
    )
    return knows_the_first


@pytest.mark.parametrize("moved_on", [given_up, enabled_again])
def test_what_a_client_writes_late_for_a_generation_that_is_gone_is_never_read(beside, moved_on):
    """Its number comes from what its biases are computed of: that of another one is another number."""
    late = moved_on(beside)
    beside.assert_found(beside.new)
    # Near a query, so that its bias is seen.
    beside.write(3, 3 * beside.queries[0], late)
    beside.assert_found(beside.new, without=[3])
    assert status(beside.store, beside.name).pending == 1
    refresh(beside.store, beside.name, client_ttl=0.0)
    beside.assert_found(beside.new)


def test_an_unfinished_refresh_is_carried_on(beside, monkeypatch):
    put = Entries.put

    def killed(entries, *args):
        put(entries, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Entries, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        beside.refreshed()
    monkeypatch.undo()
    beside.assert_found(beside.old)
    beside.write(5, vectors(beside.rng, 1, DIM)[0])
    beside.write(ITEMS, vectors(beside.rng, 1, DIM)[0])
    beside.assert_found(beside.old)

    done = refresh(beside.store, beside.name, client_ttl=0.0)
    assert done.reason == "one was not finished"
    beside.assert_found(beside.new)
    assert status(beside.store, beside.name).pending == 0


def test_rows_of_plain_clients_are_filled_and_those_of_deleted_rows_go(beside):
    vector = vectors(beside.rng, 1, DIM)[0]
    key = beside.database.key(ITEMS)
    beside.database.put(beside.name, [{"id": key, "vector": vector, "group": 1}])
    beside.items, beside.keys = np.vstack([beside.items, vector]), [*beside.keys, key]
    assert status(beside.store, beside.name).pending == 1
    done = refresh(beside.store, beside.name, client_ttl=0.0)
    assert (done.action, done.written) == ("pending", 1)
    beside.assert_found(beside.old)
    beside.refreshed()
    beside.assert_found(beside.new)


def test_a_collection_that_has_lost_all_rows_gets_another_bank(beside):
    beside.store.delete(beside.name, beside.keys)
    done = beside.refreshed()
    assert (done.action, done.rows) == ("full", 0)
    assert beside.state.other.use == "former"
    beside.items, beside.keys = beside.items[:0], []
    beside.write(0, vectors(beside.rng, 1, DIM)[0])
    beside.assert_found(beside.new)


def test_an_estimator_that_learns_from_the_gallery_is_not_fitted_without_rows(beside):
    beside.store.delete(beside.name, beside.keys)
    with pytest.raises(EmptyCollection, match=rf"'{beside.name}' has no rows .* insert items"):
        beside.refreshed(estimator=Sinkhorn())
    assert beside.state.other is None


def test_a_slow_writer_gives_its_row_the_bias_of_a_refresh_that_began_meanwhile(
    beside, monkeypatch
):
    """It has read the state before the refresh, and its vector comes after the refresh has read the rows."""
    client = beside.database.application(0.2)
    client.search(beside.name, data=[beside.queries[0]], limit=1)
    vector = vectors(beside.rng, 1, DIM)[0]
    done = []

    def refresh_between():
        if not done:
            done.append(1)
            beside.refreshed(client_ttl=0.3)

    # Between the reading of the state and the request.
    for owner, name in ((Writes, "_encoded"), (Writing, "_encode_call")):
        encode = getattr(owner, name)

        def late(self, *args, encode=encode, **options):
            encoded = yield from encode(self, *args, **options)
            refresh_between()
            return encoded

        monkeypatch.setattr(owner, name, late)
    beside.write(3, vector, client)
    assert done
    beside.assert_found(beside.new)


def test_a_collection_that_is_enabled_again_begins_anew(beside):
    beside.refreshed()
    disable(beside.store, beside.name)
    plan = plan_correction(
        beside.store, beside.name, Recipe(QueryBank(beside.old), estimator=NNN(K, ALPHA)), Beside()
    )
    enable(beside.store, plan, client_ttl=0.0)
    beside.assert_found(beside.old)


def test_a_job_that_was_killed_before_its_repair_leaves_no_bias_of_another_vector(
    beside, monkeypatch
):
    """It has written the bias of a vector that a client changed meanwhile, into the generation in use."""
    key = beside.database.key(ITEMS)
    # The best answer to a query, so that its bias is seen.
    first, second = vectors(beside.rng, 1, DIM)[0], 3 * beside.queries[0]
    beside.database.put(beside.name, [{"id": key, "vector": first, "group": 1}])
    beside.items, beside.keys = np.vstack([beside.items, first]), [*beside.keys, key]
    put = Entries.put

    def killed(entries, *args):
        beside.write(ITEMS, second)
        put(entries, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Entries, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        refresh(beside.store, beside.name, client_ttl=0.0)
    monkeypatch.undo()
    assert status(beside.store, beside.name).pending == 0
    refresh(beside.store, beside.name, client_ttl=0.0)
    beside.assert_found(beside.old)


def test_a_rollback_covers_rows_that_were_written_since_before_searches_go_back(
    beside, monkeypatch
):
    beside.refreshed()
    beside.write(3, vectors(beside.rng, 1, DIM)[0])
    beside.write(ITEMS, vectors(beside.rng, 1, DIM)[0])
    seen = []
    cls = type(beside.store)
    write_property = cls.write_property

    def noted(store, collection, name, record):
        beside.assert_found(beside.new if len(seen) < 2 else beside.old)
        write_property(store, collection, name, record)
        if collection == beside.name and name == "hubness":
            seen.append((record.profile.slot, record.other.use))

    monkeypatch.setattr(cls, "write_property", noted)
    done = take_back(beside)
    assert seen == [(1, "returning"), (0, "former")]
    assert done.carried == 2, "the entries of the other rows were there still"
    beside.assert_found(beside.old)
    beside.refreshed(vectors(beside.rng, 35, DIM))
    assert beside.state.profile.epoch == 3, "no epoch comes twice"


def test_a_rollback_is_taken_back_by_the_next(beside):
    beside.refreshed()
    for bank in (beside.old, beside.new, beside.old):
        take_back(beside, field=beside.state.field)
        beside.assert_found(bank)


def test_a_rollback_that_was_killed_is_carried_on_by_either_job(beside, monkeypatch):
    def killed(*args, **options):
        raise KeyboardInterrupt

    beside.refreshed()
    for carried_on in (
        take_back,
        lambda beside: refresh(beside.store, beside.name, client_ttl=0.0),
    ):
        wanted = beside.old if beside.state.profile.slot else beside.new
        with monkeypatch.context() as patch:
            patch.setattr(Entries, "put", killed)
            patch.setattr(Entries, "wait_visible", killed)
            with pytest.raises(KeyboardInterrupt):
                take_back(beside)
        assert beside.state.other.use == "returning"
        carried_on(beside)
        beside.assert_found(wanted)
        assert beside.state.other.use == "former"


def test_a_rollback_gives_an_unfinished_refresh_up(beside):
    state = announced(beside)
    done = take_back(beside)
    assert "was given up" in done.reason
    assert beside.state.other is None
    beside.assert_found(beside.old)
    beside.write(5, vectors(beside.rng, 1, DIM)[0])
    beside.assert_found(beside.old)
    assert state.filling.bank.generation == state.profile.bank.generation
    assert beside.store.load_bank(state.profile.bank), "both generations had this bank"
    with pytest.raises(InvalidInput, match="was never refreshed"):
        take_back(beside)


@pytest.mark.lite_only
def test_side_collections_that_are_not_loaded_are_loaded_by_a_job_on_milvus_lite(lite):
    """Milvus Lite opens with all collections released."""
    beside = CorrectedBeside(OnMilvus.of(lite))
    sides = beside.state.codec.sides
    for side in sides:
        lite.client().release_collection(side)
    lite.client().delete(sides[0], ids=[3])
    assert status(beside.store, beside.name).pending == 1
    for side in sides:
        lite.client().release_collection(side)
    beside.refreshed()
    beside.assert_found(beside.new)
