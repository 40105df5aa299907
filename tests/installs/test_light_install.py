"""The extra [check]: the first look without torch, scikit-learn and SciPy, and with the same verdict."""

import json
import re

import numpy as np
import pytest
from milvus_lite.server_manager import server_manager_instance

from milvus_hubness import Gallery, check, connect
from milvus_hubness.basics.requirements import install_line
from tests.support.galleries import hubby_gallery, plain_collection
from tests.support.installs import OF_JOBS_ALONE, packages_without, run_with
from tests.support.projects import project

ITEMS, QUERIES, ANSWERS = hubby_gallery()
ROUNDING = 1e-4
TIES = 2e-3
"""Of measures that tuning takes as means over parts of 200 labelled queries: NumPy and torch round scores
differently, so that one query may change its answer in a part."""


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
    done = run("check", *files, *pairs, "--page", "hubness.html", "--json")
    assert done.returncode == 0, done.stderr
    in_light = json.loads(done.stdout)["check"]
    assert (folder / "hubness.html").read_text().startswith("<!DOCTYPE html>")

    judged = {"judgements": "pairs.npz"} if pairs else {}
    in_full = check(Gallery.load("items.npy", "IP"), recipe="past.npy", **judged).to_dict()
    assert in_light["verdict"] == in_full["verdict"] == "apply"
    assert in_light["sentence"] == in_full["sentence"]
    in_full = json.loads(json.dumps(in_full, default=float))
    assert_same(in_light["tuning"], in_full["tuning"], TIES if pairs else ROUNDING)
    assert_same(in_light["diagnosis"], in_full["diagnosis"], ROUNDING)


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
    assert (
        "Next: milvus-hubness migrate run photos --bank past.npy --alias ALIAS --plan\n"
        in done.stdout
    )


def test_what_needs_torch_names_the_extra_in_one_line(light):
    run, _ = light
    done = run("quari", "train", "--pairs", "pairs.npz", "--out", "network")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "milvus-hubness: safetensors, scipy, sklearn, torch are not installed: "
        f"{install_line('jobs')}\n"
    )


WITHOUT_SCIPY = """
import numpy as np
from milvus_hubness import Centroids, MissingExtra, MultiVectors
from milvus_hubness.correction.estimators.matching import Pairs, one_to_one

rows = MultiVectors.from_list(list(np.eye(200, 8, dtype=np.float32).reshape(100, 2, 8)))
number = np.zeros(1, np.int64)
pairs = Pairs(queries=number, items=number, scores=np.ones(1, np.float32))
for compute in (
    lambda: Centroids.of(rows, refined=1).scores(rows),
    lambda: one_to_one(pairs, np.ones(1, np.float32), 1),
):
    try:
        compute()
    except MissingExtra as error:
        print(error)
"""


def test_python_calls_that_need_scipy_name_the_extra(packages, tmp_path):
    done = run_with(packages, "-c", WITHOUT_SCIPY, cwd=tmp_path)
    line = f"scipy is not installed: {install_line('jobs')}"
    assert done.stdout.splitlines() == [line, line], done.stderr


def test_the_extra_installs_nothing_of_jobs_alone():
    """Names of distributions, as they stand in pyproject.toml."""
    lines = project(".")["optional-dependencies"]["check"]
    names = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in lines}
    assert "faiss_cpu" in names
    assert not names & {*OF_JOBS_ALONE, "milvus_hubness"}


def assert_same(light, full, most_apart):
    """Equal, and numbers to within `most_apart`."""
    if isinstance(light, dict):
        assert light.keys() == full.keys()
        for name in light:
            assert_same(light[name], full[name], most_apart)
    elif isinstance(light, list):
        assert len(light) == len(full)
        for one, other in zip(light, full, strict=True):
            assert_same(one, other, most_apart)
    elif isinstance(light, float):
        assert light == pytest.approx(full, abs=most_apart)
    else:
        assert light == full
