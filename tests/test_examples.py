"""Each script in examples/ runs to its end, and prints what its reader would notice."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from milvus_hubness.demo.run import collect
from tests.support.names import problems

EXAMPLES = Path(__file__).parents[1] / "examples"
TESTED_HERE = {
    "quickstart",
    "fastapi_search",
    "text_to_image",
    "migrate_with_progress",
    "scheduled_refresh",
    "langchain_store",
    "beir_folder",
}
OF_JOBS = {"torch", "sklearn", "safetensors", "tenacity", "jinja2"}


@pytest.fixture(scope="module")
def pairs():
    """Every second function of the standard library."""
    return collect()[::2]


@pytest.fixture(autouse=True)
def demands_a_verdict(monkeypatch):
    """As for users."""
    monkeypatch.delenv("MILVUS_HUBNESS_VERDICT")


@pytest.fixture
def output_of(tmp_path, monkeypatch, capsys):
    """Return a function that runs an example as a program on a new database, and returns the lines it prints."""

    def output_of(name):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", str(tmp_path / f"{name}.db")])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return output_of


@pytest.fixture
def fewer_functions(monkeypatch, pairs):
    monkeypatch.setattr("milvus_hubness.demo.run.collect", lambda: pairs)


def numbers(line):
    return [
        float(number.replace(",", "")) for number in re.findall(r"(?<![\w@.])\d[\d,]*\.?\d*", line)
    ]


def test_every_example_is_tested_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED_HERE


@pytest.mark.parametrize("name", sorted(TESTED_HERE))
def test_what_an_example_names_exists(name):
    """`make test-long` runs some of them only."""
    assert problems((EXAMPLES / f"{name}.py").read_text("utf-8")) == []


@pytest.mark.usefixtures("fewer_functions")
def test_quickstart_raises_recall(output_of):
    [sizes, *recalls] = output_of("quickstart")
    assert min(numbers(sizes)) > 500
    for line, least_gain in zip(recalls, (3, 3), strict=True):
        before, after = numbers(line)
        assert after >= before + least_gain, line


def test_text_to_image_corrects_the_made_hubs(output_of):
    [raw, raw_unreached, corrected, corrected_unreached] = map(numbers, output_of("text_to_image"))
    assert corrected[0] >= raw[0] + 10
    assert corrected[1] < raw[1] / 2, "the worst hub takes fewer first places"
    assert corrected_unreached[0] < raw_unreached[0], "more images are found"


def test_migrate_with_progress_loses_no_row(output_of):
    [plan, *events, counts, rolled_back] = output_of("migrate_with_progress")
    assert plan == "products -> products_hubness: 3,000 rows, vectors of 64 -> 80 numbers"
    assert [line for line in events if line.startswith("  copied 3,000 of 3,000 rows")]
    assert "  verified 3,000 rows, 9,000 field values are equal" in events
    assert counts == "products has 3,000 rows; live, which is now products_hubness, has 3,000"
    assert rolled_back.startswith("rolled back: live is products again, 0 rows")


def test_scheduled_refresh_gives_new_rows_their_biases(tmp_path, capsys):
    script = runpy.run_path(str(EXAMPLES / "scheduled_refresh.py"))
    uri = str(tmp_path / "scheduled.db")
    assert script["run"](uri) == (0, 40, 0)
    [line, summary] = capsys.readouterr().out.splitlines()
    assert json.loads(line) | {"reason": ""} == {
        "collection": "products",
        "action": "pending",
        "reason": "",
        "rows": 540,
        "pending": 40,
        "written": 40,
    }
    assert summary == "40 rows waited for a bias, 0 wait now"
    assert script["refresh_once"](uri, "no_such_collection") == 1
    assert "no_such_collection" in json.loads(capsys.readouterr().out)["error"]


def test_beir_folder_has_the_same_figures_everywhere(output_of, monkeypatch, pairs):
    monkeypatch.setattr("milvus_hubness.demo.run.collect", lambda: pairs[::2])
    [sizes, verdict, ours, theirs, afterwards] = output_of("beir_folder")
    queries, rights, rows = numbers(sizes)
    assert queries == 300
    assert rights > 1.1 * queries
    assert rows > queries
    assert verdict.startswith("verdict: apply")
    assert numbers(ours) == numbers(theirs)
    before, after = numbers(ours)
    assert 0.1 < before < after < 1
    assert numbers(afterwards) == pytest.approx([after], abs=0.01)


@pytest.mark.usefixtures("fewer_functions")
def test_langchain_store_gives_more_right_answers(output_of):
    pytest.importorskip("langchain_milvus_hubness")
    [answers, added] = output_of("langchain_store")
    questions, before, after = numbers(answers)
    assert questions == 150
    assert after >= 1.15 * before
    assert added.startswith("added afterwards, and found: ")


def test_fastapi_search_answers_without_the_libraries_of_jobs(tmp_path):
    code = f"""
import json, runpy, sys
script = {str(EXAMPLES / "fastapi_search.py")!r}
app = runpy.run_path(script, run_name="__main__")["app"]
from fastapi.testclient import TestClient
with TestClient(app) as service:
    raw = service.get("/search", params={{"text": "wrap text", "limit": 2, "strength": 0}}).json()
    refused = service.get("/search", params={{"text": "1 + 1"}}).status_code
loaded = sorted({{name.split(".")[0] for name in sys.modules}})
print(json.dumps([raw, refused, loaded]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    [*printed, last] = done.stdout.splitlines()
    assert [line.split()[1] for line in printed][:1] == ["wrap"]
    scores = [numbers(line)[0] for line in printed]
    assert len(scores) == 5
    assert scores == sorted(scores, reverse=True)
    raw, refused, loaded = json.loads(last)
    assert len(raw) == 2
    assert refused == 422
    assert not OF_JOBS & set(loaded)
    assert {"milvus_hubness", "fastapi"} <= set(loaded)
