"""Overlapping jobs, held calls and takeovers: no write of HubnessClient is undone."""

import os
import random
import time
from contextlib import contextmanager

import pytest
from pymilvus.client import grpc_handler

from tests.chaos.jobs import be_quiet
from tests.chaos.kinds import KINDS
from tests.chaos.scene import CLIENT_TTL, Scene, milvus
from tests.chaos.trials import Trial, run_trial

SEED = int(os.environ.get("CHAOS_SEED", "7"))
LEASE_SECONDS = 2.0
ESTIMATOR = ["--method", "nnn", "--k", "4", "--alpha", "0.75"]
WRITTEN = 86


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    with milvus("lite", tmp_path_factory.mktemp("chaos")) as address:
        yield address


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """As other tests are, after these."""
    monkeypatch.setattr("pymilvus.client.grpc_handler.time", grpc_handler.time)
    be_quiet()


@pytest.fixture
def scene(uri, tmp_path):
    with Scene(uri, tmp_path, random.Random(SEED)) as made:
        yield made


def write_86_and_86(scene):
    keys = sorted(scene.model)
    scene.rng.shuffle(keys)
    scene.update(keys[:WRITTEN])
    scene.delete(keys[WRITTEN : 2 * WRITTEN])


@contextmanager
def held_and_stopped(scene, argv, collection, *, nth=1, rows=60, host=""):
    """A job that is stopped, with its nth Upsert to this collection held; its lease has expired."""
    relay = scene.relay("A")
    upsert = relay.hold("Upsert|Insert", collection, nth)
    job = scene.start("A", argv, relay, lease_seconds=LEASE_SECONDS, rows=rows, host=host)
    assert upsert.wait_held(60), f"the first job made no such call: {job.message}"
    job.stop()
    time.sleep(LEASE_SECONDS + 0.5)
    yield job, upsert
    job.kill()


def test_a_late_write_of_a_refresh_undoes_nothing(scene):
    scene.make()
    run = ["migrate", "run", scene.source, "--bank", str(scene.banks[0]), *ESTIMATOR, "--alias", scene.name]
    corrected = scene.do(*run, "--no-writers").result["facts"]["target"]
    argv = ["refresh", corrected, "--bank", str(scene.banks[1]), "--force", "--client-ttl", str(CLIENT_TTL)]
    with held_and_stopped(scene, argv, corrected, rows=600) as (first, upsert):
        second = scene.do(*argv, lease_seconds=LEASE_SECONDS)
        assert second.result["refresh"]["action"] == "full"
        write_86_and_86(scene)
        scene.compare("before the late write")
        upsert.release()
        first.go_on()
        code = first.wait()
    scene.compare("after the first refresh ended")
    assert code == 0 or "lease" in first.message, first.message
    scene.do(*argv)
    scene.compare("after one more refresh")
    scene.assert_biases(scene.banks[1])


def test_a_write_that_failed_and_arrives_while_its_job_goes_on_undoes_nothing(scene):
    """The job has sent it again, and repaired those rows, before it arrives."""
    scene.make()
    run = ["migrate", "run", scene.source, "--bank", str(scene.banks[0]), *ESTIMATOR, "--alias", scene.name]
    corrected = scene.do(*run, "--no-writers").result["facts"]["target"]
    argv = ["refresh", corrected, "--bank", str(scene.banks[1]), "--force", "--client-ttl", str(CLIENT_TTL)]
    relay = scene.relay("A")
    late, fourth = relay.late("Upsert", corrected), relay.hold("Upsert", corrected, 4)
    job = scene.start("A", argv, relay, rows=60)
    assert fourth.wait_held(60), f"the job did not go on: {job.message}"
    write_86_and_86(scene)
    scene.compare("before the late write")
    late.release()
    assert late.delivered.is_set()
    fourth.release()
    assert job.wait() == 0, job.message
    scene.compare("after the refresh ended")
    scene.assert_biases(scene.banks[1])


def test_a_migration_that_was_taken_over_undoes_nothing(scene):
    """The second run finishes and switches; then the first one's copying call arrives."""
    scene.make()
    argv = ["migrate", "run", scene.source, "--bank", str(scene.banks[0]), *ESTIMATOR]
    argv += ["--alias", scene.name, "--client-ttl", str(CLIENT_TTL)]
    copy = f"{scene.source}_hubness"
    with held_and_stopped(scene, argv, copy, nth=2, host="another") as (first, upsert):
        second = scene.do(*argv, lease_seconds=LEASE_SECONDS)
        assert second.result["facts"]["phase"] == "switched"
        write_86_and_86(scene)
        scene.compare("before the late write")
        upsert.release()
        first.go_on()
        code = first.wait()
    scene.compare("after the first run ended")
    assert code != 0 or first.result["facts"]["phase"] == "switched"
    scene.do(*argv[:3])
    scene.compare("after one more run")
    assert scene.plain.describe_alias(scene.name)["collection_name"] == second.result["facts"]["target"]


FIRST_OF_GROUP = {kind.group: name for name, kind in reversed(KINDS.items())}
FIXED = [
    *((name, "take over", 11) for name in FIRST_OF_GROUP.values()),
    ("refresh", "duplicate", 3),
    ("refresh", "late", 5),
    *(pytest.param(name, "take over", 13, marks=pytest.mark.long) for name in KINDS),
    *(pytest.param(name, "together", 17, marks=pytest.mark.long) for name in KINDS),
]
"""One of each group in make test, with one write delivered twice; the others in make test-long."""


@pytest.mark.parametrize(("kind", "plan", "seed"), FIXED)
def test_a_trial(uri, tmp_path, kind, plan, seed):
    outcome = run_trial(Trial(seed, kind, "lite", plan), uri, tmp_path)
    assert not outcome.problem, outcome.line
