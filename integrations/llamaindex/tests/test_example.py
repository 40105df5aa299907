"""The example runs, and correction answers more of its questions rightly."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "search_code.py"


def test_more_questions_are_answered_rightly(uri, capsys):
    before, after = runpy.run_path(str(EXAMPLE))["run"](uri)
    assert after >= 1.15 * before
    assert f"{before} uncorrected, {after} with HubnessVectorStore" in capsys.readouterr().out
