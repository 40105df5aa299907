"""examples/first_hour.ipynb runs to its end, and shows what its reader would notice."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.names import problems

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_hour.ipynb"


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The cells with code, after a run in an empty folder."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with pytest.MonkeyPatch.context() as changed:
        # As for users.
        changed.delenv("MILVUS_HUBNESS_VERDICT", raising=False)
        folder = tmp_path_factory.mktemp("first_hour")
        place = {"metadata": {"path": str(folder)}}
        # A kernel of this very Python, whatever kernels the machine has.
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cells, part):
    """What the one cell with this code prints."""
    [cell] = [cell for cell in cells if part in cell.source]
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def shown(cells, part):
    """What the one cell with this code shows, by its type."""
    [cell] = [cell for cell in cells if part in cell.source]
    [data] = [output.data for output in cell.outputs if output.output_type == "execute_result"]
    return data


def percentages(text):
    return [float(number) for number in re.findall(r"(\d+\.\d)%", text)]


def test_the_verdict_is_printed(cells):
    line = printed(cells, "result = check(")
    assert re.fullmatch(
        r"apply: expect \+\d+\.\d points of R@1, cautiously: 300 pairs show .*\n", line
    )


def test_the_page_is_shown_inline(cells):
    html = shown(cells, "result  # the page")["text/html"]
    assert html.startswith("<iframe srcdoc=")
    assert "&lt;svg" in html, "the charts are in it"
    assert "apply" in html


def test_searches_find_more_and_the_rollback_brings_the_old_ones_back(cells):
    assert shown(cells, "migrate(plain, plan")["text/plain"] == "'photos_hubness'"
    [before] = percentages(printed(cells, 'right_first(plain, "photos")'))
    raw, corrected = percentages(printed(cells, 'right_first(client, "live")'))
    assert raw == before
    assert corrected >= before + 10
    line = printed(cells, 'rollback(plain, "live")')
    assert line == f"live is photos: {before:.1f}% as before\n"


def test_what_the_notebook_names_exists():
    """`make test-long` runs it."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert problems("\n".join(code)) == []


def test_the_notebook_is_stored_without_output():
    """Outputs of one run would differ from those of the next, and hide what a change does."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert NOTEBOOK.stat().st_size < 20_000
