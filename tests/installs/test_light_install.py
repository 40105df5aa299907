"""The extra [check]: the first look without torch, scikit-learn and SciPy, and with the same verdict."""

import json
import re

import numpy as np
import pytest
from milvus_lite.server_manager import server_manager_instance

from milvus_hubness import check, connect
from tests.support.galleries import hubby_gallery, plain_collection
from tests.support.installs import OF_JOBS_ALONE, packages_without, run_with
from tests.support.projects import project

ITEMS, QUERIES, ANSWERS = hubby_gallery()
ONE_QUERY = 1 / 200
"""A share of the labelled queries. NumPy and torch round scores differently, so that one may change its answer."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The packages of a light install."""
    return packages_without(tmp_path_factory.mktemp("light") / "packages", *OF_JOBS_ALONE)


@pytest.fixture
def light(packages, tmp_path, monkeypatch):
    """Return a function that runs the command in a light install, and the folder where it runs."""
    monkeypatch.delenv("MILVUS_HUBNESS_VERDICT")
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "items.npy", ITEMS)
    np.save(tmp_path / "past.npy", QUERIES[:400])
    np.savez(tmp_path / "pairs.npz", query=QUERIES[400:], key=ANSWERS[400:])

    def run(*arguments, **variables):
        return run_with(packages, "-m", "milvus_hubness", *arguments, cwd=tmp_path, **variables)

    return run, tmp_path


def test_the_environment_lacks_torch(packages, tmp_path):
    done = run_with(packages, "-c", "import numpy, pymilvus, faiss, torch", cwd=tmp_path)
    assert done.returncode == 1
    assert "No module named 'torch'" in done.stderr


@pytest.mark.parametrize("pairs", [[], ["--pairs", "pairs.npz"]], ids=["bank", "pairs"])
def test_two_files_have_the_verdict_of_a_full_install(light, pairs):
    run, folder = light
    files = ["--items", "items.npy", "--queries", "past.npy", "--metric", "IP"]
    done = run("check", *files, *pairs, "--json")
    assert done.returncode == 0, done.stderr
    in_light = json.loads(done.stdout)["check"]
    assert (folder / "hubness.html").read_text().startswith("<!DOCTYPE html>")

    judged = {"judgements": "pairs.npz"} if pairs else {}
    in_full = check("items.npy", bank="past.npy", metric="IP", **judged).to_dict()
    assert in_light["verdict"] == in_full["verdict"] == "apply"
    assert in_light["sentence"] == in_full["sentence"]
    assert_same(in_light["tuning"], json.loads(json.dumps(in_full["tuning"], default=float)))
    assert_same(in_light["diagnosis"], json.loads(json.dumps(in_full["diagnosis"], default=float)))


def test_a_collection_on_milvus_lite(light):
    run, folder = light
    database = str(folder / "shop.db")
    client = connect(database, create=True)
    plain_collection(client, "photos", ITEMS, "IP")
    client.close()
    # One process at a time has the file.
    server_manager_instance.release_server(database)

    words = ("check", "photos", "--bank", "past.npy", "--kind", "auto")
    done = run(*words, MILVUS_HUBNESS_URI=database)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "photos: apply"
    assert "Next: milvus-hubness migrate plan photos --bank past.npy --alias live\n" in done.stdout


def test_what_needs_torch_names_the_extra_in_one_line(light):
    run, _ = light
    done = run("quari", "train", "--pairs", "pairs.npz", "--out", "network")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "milvus-hubness: safetensors, sklearn, torch are not installed: "
        'pip install "milvus-hubness[jobs]"\n'
    )


def test_the_extra_installs_nothing_of_jobs_alone():
    """Names of distributions, as they stand in pyproject.toml."""
    lines = project(".")["optional-dependencies"]["check"]
    names = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in lines}
    assert "faiss_cpu" in names
    assert not names & {*OF_JOBS_ALONE, "milvus_hubness"}


def assert_same(light, full):
    """Equal, and numbers to within the share of one query."""
    if isinstance(light, dict):
        assert light.keys() == full.keys()
        for name in light:
            assert_same(light[name], full[name])
    elif isinstance(light, list):
        assert len(light) == len(full)
        for one, other in zip(light, full, strict=True):
            assert_same(one, other)
    elif isinstance(light, float):
        assert light == pytest.approx(full, abs=ONE_QUERY)
    else:
        assert light == full
