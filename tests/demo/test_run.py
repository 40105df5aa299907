"""The demo keeps its promise through a real Milvus, and cleans up."""

import numpy as np
import pytest

from milvus_hubness.cli.demo import DemoConnection, demo
from milvus_hubness.demo.run import Retriever, run


@pytest.mark.lite_only
def test_recall_rises_by_at_least_three_points(backend, monkeypatch, pairs, retriever):
    monkeypatch.setattr("milvus_hubness.demo.run.collect", lambda: pairs)
    monkeypatch.setattr(
        "milvus_hubness.demo.run.build",
        lambda given, progress: retriever if given is pairs else None,
    )
    before = set(backend.client().list_collections())
    stages = []
    result = run(backend.uri, progress=lambda *stage: stages.append(stage[0]))
    # The gallery is the running Python's own library: 3.11 gains 10 points, 3.13 gains 5.
    assert result["corrected"]["r1"] >= result["raw"]["r1"] + 3
    assert result["corrected"]["r10"] > result["raw"]["r10"]
    assert result["corrected"]["skewness"] < result["raw"]["skewness"]
    assert {"loading the gallery", "copying", "comparing, pass 1", "searching corrected"} <= set(
        stages
    )
    assert len({example["before"] for example in result["examples"]}) == 5
    assert all(example["before"] != example["after"] for example in result["examples"])
    assert set(backend.client().list_collections()) == before


@pytest.fixture
def small_demo(monkeypatch):
    """The demo on a retriever of random vectors: only what it does with the database is of interest."""
    rng = np.random.default_rng(0)
    unit = [
        vectors / np.linalg.norm(vectors, axis=1)[:, None]
        for vectors in rng.normal(size=(3, 60, 16))
    ]
    queries, gallery, bank = (vectors.astype(np.float32) for vectors in unit)
    names = [f"function {i}" for i in range(60)]
    retriever = Retriever(queries, gallery, bank, names, names)
    monkeypatch.setattr("milvus_hubness.demo.run.collect", tuple)
    monkeypatch.setattr("milvus_hubness.demo.run.build", lambda pairs, progress: retriever)


@pytest.mark.usefixtures("small_demo")
def test_kept_collections_stay_and_can_be_searched(lite):
    result = run(lite.uri, keep=True)
    lite.made += [
        result["collection"],
        result["corrected_collection"],
        f"{result['collection']}__bank",
    ]
    client = lite.hubness_client()
    assert result["kept"]
    assert client.hubness_state(result["corrected_collection"]).profile.estimator["k"] == 16


@pytest.mark.usefixtures("small_demo")
def test_a_failure_leaves_no_collection(lite, monkeypatch):
    before = set(lite.client().list_collections())

    def fail(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("milvus_hubness.demo.run.migrate", fail)
    with pytest.raises(KeyboardInterrupt):
        run(lite.uri)
    assert set(lite.client().list_collections()) == before


@pytest.mark.lite_only
@pytest.mark.usefixtures("small_demo")
def test_the_command_ends_with_the_lines_to_type_next(capsys, caplog):
    """Nothing is said of its temporary database, which goes as a whole."""
    demo(DemoConnection())
    *_, for_files, for_collection = capsys.readouterr().out.splitlines()
    assert not [each for each in caplog.records if each.name.startswith("milvus_hubness")]
    assert for_files == "milvus-hubness check --items items.npy --queries past_queries.npy"
    assert for_collection.startswith(
        "milvus-hubness check COLLECTION --bank past_queries.npy --uri "
    )
