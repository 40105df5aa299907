"""milvus-hubness experiment, as a user runs it, and the example of its page."""

import contextlib
import io
import json

import pytest

from tests.cli.conftest import assert_fails
from tests.docs import pages

PAGE = pages.DOCS / "how-to" / "experiment.md"


@pytest.fixture
def log(tmp_path, monkeypatch):
    """The log that the page makes, in the working folder."""
    monkeypatch.chdir(tmp_path)
    blocks = [block.text for block in pages.blocks(PAGE) if block.language == "python"]
    [splitting] = [text for text in blocks if "def arm_of" in text]
    [logging] = [text for text in blocks if "writerow" in text]
    # The client of the page needs a database.
    names = {}
    exec(splitting[: splitting.index("client =")], names)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(logging, names)
    return tmp_path / "log.csv"


def test_the_page_shows_what_the_command_prints(run, log):
    [shown] = [block.text for block in pages.blocks(PAGE) if block.language == "text"]
    done = run("experiment", "report", "log.csv")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip() == shown.rstrip()


def test_the_report_is_json_too(run, log):
    told = json.loads(run("experiment", "report", "log.csv", "--json").stdout)
    assert told["verdict"] == "treatment is better"
    assert told["treatment"]["name"] == "corrected"
    swapped = run("experiment", "report", "log.csv", "--json", "--control-arm", "corrected")
    assert json.loads(swapped.stdout)["verdict"] == "control is better"
    lost = json.loads(run("experiment", "report", "log.csv", "--json", "--share", "0.1").stdout)
    assert lost["verdict"] == "no difference proven yet"


def test_a_table_that_cannot_be_compared_fails_in_one_line(run, log):
    report = ("experiment", "report")
    assert_fails(run(*report, "no.csv"), 1, "no.csv")
    assert_fails(run(*report, "log.csv", "--control-arm", "x"), 1, "no arm 'x'")
    assert_fails(run(*report, "log.csv", "--share", "2"), 2, "share must be above 0 and below 1")
    log.write_text(log.read_text().replace("arm", "variant", 1))
    assert_fails(run(*report, "log.csv"), 1, "no column 'arm'", "only 'unit', 'variant', 'success'")
