"""milvus-hubness quari: train, import-weights, eval."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from milvus_hubness import NNN, MilvusStore, QueryBank, Recipe, connect, migrate, plan_correction
from milvus_hubness.extras.quari.model import Quari
from milvus_hubness.extras.quari.settings import QuariConfig, TrainingSettings
from tests.cli.conftest import DIM, assert_fails

SIZES = {
    "rank": 2,
    "width": 8,
    "heads": 2,
    "layers": 1,
    "steps": 1,
    "batch": 16,
    "learning_rate": 1e-3,
}
SMALL = (
    "--form",
    "published",
    "--param",
    "epochs=2",
    *(word for pair in SIZES.items() for word in ("--param", "{}={}".format(*pair))),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """pairs.npz with vectors of both sides, in the working folder; no database."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    items = rng.normal(size=(40, DIM)).astype(np.float32)
    items[7] = items[3]
    np.savez("pairs.npz", query=items + 0.5 * rng.normal(size=items.shape), item=items)
    return tmp_path


@pytest.mark.parametrize(
    ("read", "out"),
    [
        (("--pairs", "pairs.npz"), "pairs.npz"),
        (("--pairs", "pairs.html"), "pairs.npz"),
        (("--pairs", "pairs.npz", "--pairs-queries", "vectors.npz"), "vectors.npz"),
        (("--pairs", "pairs.npz"), "net.html"),
    ],
)
def test_a_training_never_writes_over_what_it_reads(run, folder, read, out):
    """Nor its learning curves over the network."""
    pairs = (folder / "pairs.npz").read_bytes()
    for name in ("pairs.html", "vectors.npz"):
        (folder / name).write_bytes(pairs)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = run("quari", "train", *read, "--out", out, *SMALL)
    assert_fails(done, 2, "would be the same file", "--out")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_network_never_takes_the_place_of_the_weights_that_it_is_made_of(run, folder):
    weights = (folder / "pairs.npz").read_bytes()
    done = run("quari", "import-weights", "pairs.npz", "--out", "pairs.npz")
    assert_fails(done, 2, "WEIGHTS and --out would be the same file")
    assert (folder / "pairs.npz").read_bytes() == weights


def test_a_network_is_trained_and_judged(run, folder):
    done = run(
        "quari", "train", "--pairs", "pairs.npz", "--out", "net.safetensors", *SMALL, "--json"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["quari"]
    assert told["config"]["rank"] == 2
    assert told["settings"]["epochs"] == 2
    assert [each["epoch"] for each in told["history"]] == [0, 1, 2]
    assert (folder / "net.html").read_text().count("<polyline") == 3
    shown = run(
        "quari", "train", "--pairs", "pairs.npz", "--out", "net.safetensors", *SMALL, "--resume"
    )
    assert f"{told['parameters']:,} parameters" in " ".join(shown.stdout.split())
    judged = run("quari", "eval", "net.safetensors", "--pairs", "pairs.npz", "--json")
    found = json.loads(judged.stdout)["quari"]
    assert found["queries"] == 40
    assert found["candidates"] == 39
    assert set(found["gain"]) == {"raw"}
    shown = run("quari", "eval", "net.safetensors", "--pairs", "pairs.npz", "--candidates", "5")
    assert f"{100 * found['raw']['R@1']:.1f}" in shown.stdout
    assert "for 5 candidates" in shown.stdout


def test_no_more_epochs_are_shown_than_were_allowed(run, folder):
    """The memory of linear maps is filled after them."""
    options = ("--pairs", "pairs.npz", "--param", "batch=16", "--param", "epochs=2")
    shown = run("quari", "train", *options, "--out", "maps.safetensors").stdout
    assert " 2 of 2, best " in " ".join(shown.split())


def test_linear_maps_with_a_memory_are_the_default(run, folder):
    options = ("--pairs", "pairs.npz", "--param", "batch=16", "--json")
    done = run("quari", "train", *options, "--out", "maps.safetensors")
    assert done.returncode == 0, done.stderr
    trained = json.loads(done.stdout)["quari"]
    assert trained["parameters"] == 2 * DIM**2 + 2 * 36 * DIM + 2
    assert [trained["settings"][name] for name in ("epochs", "learning_rate", "weight_decay")] == [
        16,
        3e-4,
        0,
    ]
    assert trained["history"][-1]["loss"] is None
    shown = " ".join(
        run("quari", "train", *options[:-1], "--out", "maps.safetensors", "--resume").stdout.split()
    )
    assert "two linear maps" in shown
    assert "36 pairs" in shown
    plain = run("quari", "train", *options, "--out", "plain", "--param", "memory=0")
    assert json.loads(plain.stdout)["quari"]["parameters"] == 2 * DIM**2 + 2
    judged = run("quari", "eval", "maps.safetensors", "--pairs", "pairs.npz", "--json")
    assert set(json.loads(judged.stdout)["quari"]["gain"]) == {"raw"}


def test_weights_of_the_authors_are_imported(run, folder):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Quari(QuariConfig.published(DIM, rank=2, width=16, layers=1, heads=4))
    torch.save({"state_dict": network.hypernetwork.state_dict()}, "model_weights.pt")
    options = ("--out", "net.safetensors", "--encoder", "clip", "--param", "heads=4")
    done = run("quari", "import-weights", "model_weights.pt", *options, "--json")
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)["quari"]["config"]
    assert (config["form"], config["rank"], config["width"], config["heads"], config["steps"]) == (
        *("published", 2, 16, 4, 4),
    )
    assert (
        "The authors' weights"
        in run("quari", "import-weights", "model_weights.pt", *options).stdout
    )
    judged = run(
        "quari", "eval", "net.safetensors", "--pairs", "pairs.npz", "--encoder", "clip", "--json"
    )
    assert json.loads(judged.stdout)["quari"]["queries"] == 40
    assert_fails(run("quari", "import-weights", "pairs.npz", "--out", "other"), 1, "pairs.npz")
    for name in ("rang", "encoder", "path"):
        wrong = run(
            "quari", "import-weights", "model_weights.pt", "--out", "x", "--param", f"{name}=1"
        )
        assert_fails(wrong, 2, f"--param {name}: unknown parameter")


def test_every_option_is_heard(run, folder):
    """Each given a value that is not its default, and found again in what the network was trained with."""
    given = {
        "rank": 3,
        "width": 12,
        "heads": 2,
        "layers": 2,
        "steps": 1,
        "form": "published",
        "directions": 5,
        "map_scale": 0.5,
        "query_weight": 0.25,
        "dropout": 0.3,
        "epochs": 2,
        "patience": 3,
        "batch": 9,
        "learning_rate": 2e-3,
        "least_rate": 1e-4,
        "weight_decay": 0.04,
        "temperature": 0.2,
        "noise": 0.7,
        "semi_positives": 1,
        "seed": 6,
    }
    options = []
    for name, value in given.items():
        if name == "form":
            options += ["--form", str(value)]
        else:
            options += ["--param", f"{name}={json.dumps(value)}"]
    done = run(
        "quari", "train", "--pairs", "pairs.npz", "--out", "net.safetensors", *options, "--json"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["quari"]
    heard = {**told["config"], **told["settings"]}
    assert {name: heard[name] for name in given} == given
    plain = {**asdict(QuariConfig(DIM)), **asdict(TrainingSettings())}
    assert not [name for name in given if given[name] == plain[name]]


def test_a_training_is_taken_up_where_it_was_ended(run, folder):
    options = ("--pairs", "pairs.npz", *SMALL)
    run("quari", "train", *options, "--out", "net.safetensors")
    again = run("quari", "train", *options, "--out", "net.safetensors", "--resume", "--json")
    assert [each["epoch"] for each in json.loads(again.stdout)["quari"]["history"]] == [0, 1, 2]
    other = run(
        "quari", "train", *options, "--param", "noise=0", "--out", "net.safetensors", "--resume"
    )
    assert_fails(other, 1, "started with other noise")
    assert_fails(
        run("quari", "train", *options, "--out", "none", "--resume"),
        1,
        "none: no such file; check the path",
    )


def test_rows_of_a_corrected_collection_are_the_gallery(run, files):
    store, rng = MilvusStore(connect("shop.db")), np.random.default_rng(1)
    plan = plan_correction(store, "products", Recipe(QueryBank.load("bank.npy"), estimator=NNN(8)))
    name = migrate(store, plan).target
    rows = connect("shop.db").query(
        "products", filter="id >= 0", output_fields=["vector"], limit=60
    )
    keys = np.array([row["id"] for row in rows])
    items = np.array([row["vector"] for row in rows], np.float32)
    np.savez("keyed.npz", query=items + 0.2 * rng.normal(size=items.shape), key=keys)
    keyed = ("--pairs", "keyed.npz", "--collection", name)
    done = run(
        "quari", "train", *keyed, "--out", "net.safetensors", "--encoder", "mini", *SMALL, "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["quari"]["pairs"] == 54
    judged = run("quari", "eval", "net.safetensors", *keyed, "--encoder", "mini", "--json")
    assert set(json.loads(judged.stdout)["quari"]["gain"]) == {"raw", "corrected"}
    other = run("quari", "eval", "net.safetensors", *keyed, "--encoder", "maxi")
    assert_fails(other, 1, "trained for 'mini'")


def test_what_is_wrong_is_said_in_a_line(run, folder):
    train = ("quari", "train", "--out", "net.safetensors")
    vectors = np.ones((6, DIM), np.float32)
    np.savez("unequal.npz", query=vectors, item=vectors[:5])
    assert_fails(run(*train, "--pairs", "unequal.npz"), 1, "6 queries for 5 items")
    np.savez("wide.npz", query=vectors, item=np.ones((6, DIM + 1)))
    assert_fails(run(*train, "--pairs", "wide.npz"), 1, f"dimension {DIM}", f"has {DIM + 1}")
    np.savez("no_items.npz", query=vectors)
    assert_fails(run(*train, "--pairs", "no_items.npz"), 1, "has no array 'item', only 'query'")
    assert_fails(run(*train, "--pairs", "pairs.npz", "--param", "rank=0"), 2, "rank")
    assert_fails(
        run(*train, "--pairs", "pairs.npz", "--param", "rang=8"), 2, "rang: unknown parameter"
    )
    assert_fails(run(*train, "--pairs", "pairs.npz", "--form", "odd"), 2, "form")
    for form, other in (("linear", "published"), ("published", "linear")):
        other_form = run(*train, "--pairs", "pairs.npz", "--form", form, "--param", f"form={other}")
        assert_fails(other_form, 2, "--param form: pass --form")
    wrong = run(*train, "--pairs", "pairs.npz", "--form", "published", "--param", "memory=5")
    assert_fails(wrong, 2, "memory is for the form linear")
    (folder / "broken").write_bytes(b"no network")
    assert_fails(
        run("quari", "eval", "broken", "--pairs", "pairs.npz"), 1, "not a readable safetensors"
    )
    assert run("quari", "train", "--pairs", "pairs.npz").returncode == 2
    run(*train, "--pairs", "pairs.npz", *SMALL)
    rng = np.random.default_rng(2)
    np.savez("wider.npz", query=rng.normal(size=(5, 9)), item=rng.normal(size=(5, 9)))
    assert_fails(
        run("quari", "eval", "net.safetensors", "--pairs", "wider.npz"), 1, f"for dimension {DIM}"
    )
