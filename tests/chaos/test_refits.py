"""A refit with sampled queries, in real processes: killed and run again, and paused while another takes over."""

import os
import random
import signal
import time

import numpy as np
import pytest

from milvus_hubness.jobs.common.corrections import load_correction
from milvus_hubness.jobs.common.stored_biases import StoredBiases
from milvus_hubness.jobs.migration.corrected import unfinished
from milvus_hubness.jobs.migration.ledger import Ledger
from milvus_hubness.jobs.refresh.sampling import start_sampling
from milvus_hubness.jobs.refresh.status import status
from milvus_hubness.jobs.store.records import Sample, SamplesOf
from milvus_hubness.milvus.store.banks import put_samples
from tests.chaos.corrected import Corrected
from tests.chaos.draws import drawn_biases
from tests.chaos.milvus import MilvusPlace
from tests.chaos.moments import Moment
from tests.chaos.pauses import SHAPE, _expire, _paused
from tests.chaos.places import Command
from tests.chaos.sources import DIM
from tests.support.galleries import all_keys, vectors

SECONDS_LATER = 60
"""By how much samples are newer than any fit, within what the clock of a client may be ahead."""


class Refit:
    """A collection that has grown by a third, and enough queries that clients have sampled since."""

    def __init__(self, place, folder):
        self.place = place
        self.corrected = Corrected(place, f"refit_{os.getpid()}_{folder.name}", SHAPE, "vector", 3)
        _, self.biases, _ = drawn_biases(folder, "nnn", "bank")
        real = folder / "real.npy"
        np.save(real, vectors(np.random.default_rng(4), 200, DIM))
        self.name = f"{self.corrected.name}_live"
        self.samples = ""
        argv = ("--refit-share", "0.2", "--queries", str(real))
        self.command = Command(
            place, ("refresh", self.name, *argv, "--uri", place.address, "--json"), follows="copy"
        )

    def make(self, database):
        self.corrected.make(database, self.biases)
        database.store.point_alias(self.name, self.corrected.name)
        sampled = start_sampling(database.store, self.name, rate=1e-9)
        self.samples = sampled.sampling.samples_collection
        self.corrected.kept.add(self.samples)
        self.corrected.insert_pending(database, 120)
        self.sample(database, 0, 250)

    def sample(self, database, first, count):
        info = database.store.info(self.name, counted=False)
        [sampling] = info.samplings.fields
        asked = vectors(np.random.default_rng(first), count, DIM)
        later = int(time.time()) + SECONDS_LATER
        samples = [Sample(first + n, first + n, later, query) for n, query in enumerate(asked)]
        put_samples(
            database.store.client, SamplesOf(sampling.helper, info.collection_id), samples, 10
        )

    def assert_refitted_once(self, database):
        """All rows have the biases of one new bank, and nothing of a refit is left or due."""
        store = database.store
        info = store.info(self.name)
        state = info.state
        assert state.profile.epoch == 2
        former = store.info(self.corrected.name).state
        assert state.profile.bank.fingerprint != former.profile.bank.fingerprint
        rows = StoredBiases(store, info, state).read(all_keys(store, self.name), None)
        assert len(rows.batch) == len(self.corrected.wanted) == 420
        wanted = load_correction(store, state, state.profile).centred(rows.vectors)
        np.testing.assert_allclose(rows.biases[:, state.profile.slot], wanted, atol=1e-4)
        bank = state.profile.bank.collection
        # What killed jobs have left goes a day later.
        store.drop_spare_generations(bank, Ledger(store).used_banks, older_than=-60)
        generations = database.generations(bank)
        banks = (*state.banks, *former.banks)
        assert generations == {bank.generation: bank.count for bank in banks}
        present = status(store, self.name)
        assert (present.unfitted_share, present.new_bank_due) == (0, "")


def killed_and_continued(refit, moment):
    with refit.place.open() as database:
        refit.make(database)
    try:
        assert refit.command.struck("process", moment) == -signal.SIGKILL
        with refit.place.open() as database:
            info = database.store.info(refit.name)
            left = unfinished(
                database.store, Ledger(database.store).migrations(info.name), info, info.state.field
            )
            begun = left and left.state.profile.bank.generation
            # Clients go on sampling.
            refit.sample(database, 1_000, 30)
        assert refit.command.run() == 0, refit.command.told()
        assert refit.command.run() == 0, refit.command.told()
        with refit.place.open() as database:
            refit.assert_refitted_once(database)
            if begun:
                state = database.store.info(refit.name).state
                assert state.profile.bank.generation == begun, "it was begun again"
    finally:
        refit.corrected.drop()
    return begun


def test_a_killed_refit_is_continued(tmp_path):
    with MilvusPlace.within(tmp_path).hosted() as place:
        assert killed_and_continued(Refit(place, tmp_path), Moment("copying", 9))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_a_refit_that_is_killed_anywhere(tmp_path, seed):
    rng = random.Random(seed)
    stages = [
        "looking",
        "judging",
        "announcing",
        "copying",
        "verifying",
        "switching",
        "cleaning up",
    ]
    stage = rng.choice(stages)
    moment = Moment(stage, rng.randint(1, 12), edge=rng.choice(["before", "after"]))
    with MilvusPlace.within(tmp_path).hosted() as place:
        killed_and_continued(Refit(place, tmp_path), moment)


@pytest.mark.long
def test_a_killed_refit_is_continued_on_a_server(served_uri, tmp_path):
    place = MilvusPlace.within(tmp_path, uri=served_uri)
    assert killed_and_continued(Refit(place, tmp_path), Moment("copying", 9))


@pytest.mark.parametrize("stage", ["announcing", "copying"])
def test_a_refit_that_was_paused_writes_nothing_once_another_has_made_it(tmp_path, stage):
    with MilvusPlace.within(tmp_path).hosted() as place, place.open() as database:
        refit = Refit(place, tmp_path)
        refit.make(database)
        try:
            with _paused(refit.command, Moment(stage, 3)) as paused:
                _expire(database.store, refit.corrected.name, waits=False)
                assert refit.command.run() == 0, refit.command.told()
                refit.assert_refitted_once(database)
                os.kill(paused.pid, signal.SIGCONT)
                assert refit.command.finished(paused) == 1, refit.command.told()
            refit.assert_refitted_once(database)
            # A client has grown the gallery meanwhile, by less than the share.
            refit.corrected.insert_pending(database, 20)
            assert refit.command.run() == 0, refit.command.told()
            assert database.store.info(refit.name).state.profile.epoch == 2
        finally:
            refit.corrected.drop()
