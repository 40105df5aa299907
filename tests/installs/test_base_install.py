"""The base install alone, in a fresh environment for each Python: the client without what the extras bring."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from milvus_lite.server_manager import server_manager_instance
from pymilvus import DataType

from milvus_hubness import (
    NNN,
    Beside,
    Copy,
    MilvusStore,
    QueryBank,
    Recipe,
    connect,
    enable,
    migrate,
    plan_correction,
)
from tests.support.galleries import vectors

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
CALLS = Path(__file__).with_name("calls.py")
QUIET = ["-q", "--disable-pip-version-check"]


def run(*command, **options):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        **options,
    )


def succeed(*command, **options):
    done = run(*command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    succeed(sys.executable, "-m", "pip", "wheel", *QUIET, "--no-deps", "-w", folder, ROOT)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module", params=["3.10", "3.11", "3.12", "3.13"])
def programs(request, wheel, tmp_path_factory):
    """The programs of an environment with the base install alone."""
    python, folder = shutil.which(f"python{request.param}"), tmp_path_factory.mktemp("environment")
    # A shim of pyenv may find no version behind it.
    if python is None or run(python, "--version").returncode:
        pytest.skip(f"Python {request.param} is not installed")
    succeed(python, "-m", "venv", folder)
    succeed(folder / "bin" / "pip", "install", *QUIET, "-c", ROOT / "constraints.txt", wheel)
    return folder / "bin"


@pytest.fixture
def serve(tmp_path):
    """Returns a function that serves a new Milvus Lite file of this name from this process, and returns its address.

    It has a collection for each way of correction: migrated, gated, and enabled with a side collection."""
    paths = []

    def serve(name):
        paths.append(str(tmp_path / name))
        uri = server_manager_instance.start_and_get_uri(paths[-1])
        rng = np.random.default_rng(1)
        items, bank = vectors(rng, 200, 16), QueryBank(vectors(rng, 40, 16))
        store = MilvusStore(connect(uri))
        for collection in ("source", "gated_source", "enabled"):
            _collection(store.client, collection, items)
        plan = plan_correction(
            store, "source", Recipe(bank, estimator=NNN(8)), Copy(target="migrated"), field="vector"
        )
        migrate(store, plan)
        migrate(
            store,
            plan_correction(
                store, "gated_source", Recipe(bank, gate=1), Copy(target="gated"), field="vector"
            ),
        )
        enable(
            store,
            plan_correction(
                store, "enabled", Recipe(bank, estimator=NNN(8)), Beside(), field="vector"
            ),
        )
        return uri

    yield serve
    for path in paths:
        server_manager_instance.release_server(path)


def _collection(client, name, items):
    schema = client.create_schema(enable_dynamic_field=True)
    schema.add_field("id", DataType.INT64, is_primary=True)
    index = client.prepare_index_params()
    for field in ("vector", "text"):
        schema.add_field(field, DataType.FLOAT_VECTOR, dim=items.shape[1])
        index.add_index(field, index_type="FLAT", metric_type="COSINE")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    rows = zip(items, items[::-1], strict=True)
    client.insert(
        name, [{"id": i, "vector": item, "text": text} for i, (item, text) in enumerate(rows)]
    )


def test_every_call_of_a_client_answers_as_with_all_extras(programs, serve, tmp_path):
    base, full = (
        json.loads(succeed(python, "-I", CALLS, serve(name), cwd=tmp_path))
        for python, name in ((programs / "python", "base.db"), (sys.executable, "full.db"))
    )
    assert base["loaded"] == []
    assert_same(base["answers"], full["answers"])
    assert base["answers"]["search"] != base["answers"]["raw"]


def assert_same(base, full):
    """Equal, and numbers to within the rounding of float32."""
    if isinstance(base, dict):
        assert base.keys() == full.keys()
        for name in base:
            assert_same(base[name], full[name])
    elif isinstance(base, list):
        assert len(base) == len(full)
        for one, other in zip(base, full, strict=True):
            assert_same(one, other)
    else:
        assert base == pytest.approx(full, abs=1e-5)


def test_only_what_every_client_needs_is_installed(programs):
    lines = succeed(
        programs / "pip", "list", "--format=freeze", "--disable-pip-version-check"
    ).split()
    installed = {line.partition("==")[0].lower() for line in lines}
    assert {"pymilvus", "numpy", "pydantic", "typer", "rich"} < installed
    assert not installed & {
        "torch",
        "scikit-learn",
        "scipy",
        "pyarrow",
        "faiss-cpu",
        "tenacity",
        "starlette",
        "jinja2",
    }


def test_commands_without_their_extra_name_it(programs, serve, tmp_path):
    """A refresh of few rows computes with NumPy alone, and needs no extra."""
    uri, bank = serve("commands.db"), tmp_path / "bank.npy"
    np.save(bank, vectors(np.random.default_rng(2), 60, 16))
    command = programs / "milvus-hubness"
    anew = ["refresh", "--bank", bank, "--force", "--rename"]
    for arguments in (["status"], ["refresh"], anew):
        assert "migrated" in succeed(
            command, arguments[0], "migrated", *arguments[1:], "--uri", uri
        )
    for arguments in (["tune", "source", "--field", "vector"],):
        done = run(command, *arguments, "--bank", bank, "--uri", uri)
        assert (done.returncode, done.stdout) == (1, "")
        assert "faiss" in done.stderr
        assert ' not installed: pip install "milvus-hubness[check] @ file://' in done.stderr
        assert done.stderr.count("\n") == 1
