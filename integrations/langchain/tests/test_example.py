"""The example runs, and correction gives more right answers."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "search_code.py"


@pytest.mark.long
def test_correction_gives_more_right_answers(uri, capsys, monkeypatch):
    # As for users: the bank is judged.
    monkeypatch.delenv("MILVUS_HUBNESS_VERDICT", raising=False)
    before, after = runpy.run_path(str(EXAMPLE))["run"](uri)
    assert after >= 1.15 * before
    assert f"{before} with Milvus, {after} with HubnessMilvus" in capsys.readouterr().out
