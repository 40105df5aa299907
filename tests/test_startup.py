"""What a start imports: a search service loads none of the jobs' libraries, and help loads no database client."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.main import get_command

import milvus_hubness
from milvus_hubness.cli import app

OF_JOBS = {"torch", "sklearn", "scipy", "faiss", "safetensors", "cronsim", "starlette"}


def loaded_by(code, *arguments):
    """The names of the top-level modules that a new process has loaded after the code."""
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_client_loads_little_more_than_pymilvus():
    """pymilvus itself loads pandas, and pandas PyArrow, where they are installed."""
    of_pymilvus = loaded_by("from pymilvus import MilvusClient")
    assert loaded_by("from milvus_hubness import HubnessClient") - of_pymilvus == {"milvus_hubness"}


def test_a_client_that_searches_and_inserts_loads_no_library_of_jobs(tmp_path):
    code = """
import numpy as np
from milvus_hubness import NNN, CorrectionConfig, HubnessClient, Recipe
client = HubnessClient(sys.argv[1])
rng = np.random.default_rng(0)
config = CorrectionConfig(Recipe(rng.standard_normal((50, 8)), estimator=NNN(4)))
client.create_collection("items", 8, metric_type="COSINE", hubness=config, consistency_level="Strong")
client.insert("items", [{"id": i, "vector": row} for i, row in enumerate(rng.standard_normal((20, 8)))])
hits = client.search("items", [[1.0] * 8], limit=3, with_raw_score=True)[0]
assert len(hits) == 3
client.close()
"""
    found = loaded_by(code, str(tmp_path / "items.db")) & OF_JOBS
    assert found <= {"faiss", "scipy"}, (
        "Milvus Lite loads FAISS, and a search of pymilvus SciPy, where it is installed"
    )


def test_only_public_names_are_shown_and_each_is_imported_when_it_is_used():
    code = "import milvus_hubness\nassert len(dir(milvus_hubness)) > 70\nassert 'milvus' not in dir(milvus_hubness)"
    assert loaded_by(code) & {"numpy", "pymilvus", "pydantic", *OF_JOBS} == set()
    for name in dir(milvus_hubness):
        assert getattr(milvus_hubness, name) is not None
    assert callable(milvus_hubness.enable)
    assert callable(milvus_hubness.refresh)
    with pytest.raises(AttributeError, match="module 'milvus_hubness' has no attribute 'bias'"):
        milvus_hubness.bias  # noqa: B018


def commands(group, words=()):
    yield words
    for word, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*words, word))


def test_help_of_every_command_loads_no_database_client():
    calls = [list(words) for words in commands(get_command(app))]
    assert len(calls) > 25
    code = f"""
import contextlib, io
from typer.testing import CliRunner
from milvus_hubness.cli import app
for words in {calls!r}:
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0 and "Usage" in result.output, (words, result.output)
"""
    assert sorted(loaded_by(code) & {"numpy", "pymilvus", "grpc", "pyarrow", *OF_JOBS}) == []
