"""The example runs, and correction gives more right answers. The other one: tests/qdrant/test_example.py."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.long
def test_correction_gives_more_right_answers(capsys, monkeypatch):
    # As for users: the bank is judged.
    monkeypatch.delenv("MILVUS_HUBNESS_VERDICT", raising=False)
    before, after = runpy.run_path(str(EXAMPLES / "search_code.py"))["run"](":memory:")
    assert after >= 1.15 * before
    assert (
        f"{before} with QdrantClient, {after} with HubnessQdrantClient" in capsys.readouterr().out
    )
