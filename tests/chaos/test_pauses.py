"""A paused job that another has taken over changes nothing more: no write of an application is undone."""

import os
import random
import time
from contextlib import contextmanager

import pytest

from tests.chaos.milvus import MilvusPlace
from tests.chaos.pauses import assert_one_writes
from tests.chaos.scene import Scene

SEED = int(os.environ.get("CHAOS_SEED", "7"))
LEASE_SECONDS = 1.0
ESTIMATOR = ["--method", "nnn", "--param", "k=4", "--param", "alpha=0.75"]
WRITTEN = 86


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
    run = [
        "migrate",
        "run",
        scene.source,
        "--bank",
        str(scene.banks[0]),
        *ESTIMATOR,
        "--alias",
        scene.name,
    ]
    copy = scene.do(*run, "--no-writers").result["facts"]["target"] + "_r2"
    argv = [
        "refresh",
        scene.name,
        "--bank",
        str(scene.banks[1]),
        "--force",
    ]
    with held_and_stopped(scene, argv, copy, rows=600) as (first, upsert):
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
    run = [
        "migrate",
        "run",
        scene.source,
        "--bank",
        str(scene.banks[0]),
        *ESTIMATOR,
        "--alias",
        scene.name,
    ]
    copy = scene.do(*run, "--no-writers").result["facts"]["target"] + "_r2"
    argv = [
        "refresh",
        scene.name,
        "--bank",
        str(scene.banks[1]),
        "--force",
    ]
    relay = scene.relay("A")
    late, fourth = relay.late("Upsert", copy), relay.hold("Upsert", copy, 4)
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
    argv += ["--alias", scene.name]
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
    assert (
        scene.plain.describe_alias(scene.name)["collection_name"]
        == second.result["facts"]["target"]
    )


def test_a_second_process_is_refused_then_takes_over(tmp_path):
    """A second process has done its work meanwhile, and a third was refused."""
    with MilvusPlace.within(tmp_path).hosted() as place:
        print(SEED, assert_one_writes(place, random.Random(SEED)))


@pytest.mark.long
def test_a_second_process_is_refused_then_takes_over_on_a_server(served_uri, tmp_path):
    place = MilvusPlace.within(tmp_path, None, served_uri)
    print(SEED, assert_one_writes(place, random.Random(SEED)))
