"""The report of a test on live users, from tables of every kind, and what it says of those that it refuses."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from milvus_hubness import experiment_report
from milvus_hubness.errors import InvalidInput, UnreadableFile

ROWS = 60
COLUMNS = {
    "unit": [f"user-{row // 3}" for row in range(ROWS)],
    "arm": ["raw" if row // 3 % 2 else "corrected" for row in range(ROWS)],
    "success": [row % 4 == 0 for row in range(ROWS)],
    "page": list(range(ROWS)),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def csv(path, columns=COLUMNS, separator=","):
    lines = [separator.join(columns), *(separator.join(map(str, row)) for row in rows_of(columns))]
    path_with(path, "\n".join(lines) + "\n")


def rows_of(columns):
    return zip(*columns.values(), strict=True)


def path_with(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def json_lines(path):
    rows = (dict(zip(COLUMNS, row, strict=True)) for row in rows_of(COLUMNS))
    path_with(path, "\n".join(map(json.dumps, rows)))


WRITERS = {
    "log.csv": csv,
    "log.jsonl": json_lines,
    "log.parquet": lambda path: pq.write_table(pa.table(COLUMNS), path),
    "log.arrow": lambda path: feather.write_feather(
        pa.table(COLUMNS), path, compression="uncompressed"
    ),
    "log.npz": lambda path: np.savez(path, **{k: np.array(v) for k, v in COLUMNS.items()}),
}
FRAMES = {"pandas": pd.DataFrame, "arrow": pa.table}


@pytest.mark.parametrize("path", WRITERS)
def test_every_file_gives_the_same_report(path):
    WRITERS[path](path)
    assert experiment_report(path) == experiment_report(pa.table(COLUMNS))


@pytest.mark.parametrize("kind", FRAMES)
def test_every_frame_gives_the_same_report(kind):
    found = experiment_report(FRAMES[kind](COLUMNS))
    assert found == experiment_report(pa.table(COLUMNS))
    assert (found.control.name, found.control.rows, found.control.units) == ("raw", 30, 10)
    assert found.control.success == pytest.approx(
        np.mean(
            [s for s, arm in zip(COLUMNS["success"], COLUMNS["arm"], strict=True) if arm == "raw"]
        )
    )


@pytest.mark.parametrize(
    "success", [[0, 1] * 30, [0.0, 1.0] * 30, ["false", "true"] * 30, ["False", " TRUE"] * 30]
)
def test_successes_are_numbers_or_truths(success):
    csv("log.csv", {**COLUMNS, "success": success})
    expected = experiment_report(pa.table({**COLUMNS, "success": [False, True] * 30}))
    assert experiment_report("log.csv") == expected


def test_units_and_arms_may_be_numbers():
    numbers = {
        **COLUMNS,
        "unit": [row // 3 for row in range(ROWS)],
        "arm": [row // 3 % 2 for row in range(ROWS)],
    }
    csv("log.csv", numbers)
    found = experiment_report("log.csv", control="1")
    assert found == experiment_report(pa.table(numbers), control="1")
    assert (found.control.name, found.treatment.name) == ("1", "0")


def test_the_control_is_the_arm_that_is_called_so():
    assert experiment_report(pa.table(COLUMNS), control="corrected").control.name == "corrected"
    named = {**COLUMNS, "arm": ["Control" if arm == "raw" else "B" for arm in COLUMNS["arm"]]}
    assert experiment_report(pa.table(named)).control.name == "Control"
    for arms in (("A", "B"), ("raw", "control")):
        named["arm"] = [arms[arm == "raw"] for arm in COLUMNS["arm"]]
        with pytest.raises(InvalidInput, match="say with --control-arm which one is the control"):
            experiment_report(pa.table(named))


def test_a_share_is_that_of_the_other_arm():
    assert experiment_report(pa.table(COLUMNS), share=0.1).share == 0.1


REFUSED = {
    "a column is missing": (
        {"unit": COLUMNS["unit"], "variant": COLUMNS["arm"], "success": COLUMNS["success"]},
        r"log.csv has no column 'arm', only 'unit', 'variant', 'success': rename or add it",
    ),
    "three arms": (
        {**COLUMNS, "arm": ["raw", "b", "c"] * 20},
        r"log.csv has 3 arms, 'raw', 'b', 'c': an experiment has rows of two arms",
    ),
    "one arm": (
        {**COLUMNS, "arm": ["raw"] * ROWS},
        r"log.csv has 1 arm, 'raw': an experiment has rows of two arms",
    ),
    "no row": (
        {name: [] for name in COLUMNS},
        r"log.csv has no rows: an experiment has rows of two",
    ),
    "a success above 1": (
        {**COLUMNS, "success": [0, 1, 2, *[0] * 57]},
        r"'success' of log.csv must hold true, false or numbers from 0 to 1, not 2 \(row 2, not",
    ),
    "no success": (
        {**COLUMNS, "success": ["", *[0] * 59]},
        r"numbers from 0 to 1, not '' \(row 0, not counting the header\)",
    ),
    "not a number": ({**COLUMNS, "success": ["nan", *[0] * 59]}, r"not nan \(row 0"),
    "no unit": (
        {**COLUMNS, "unit": ["a", "", *["b"] * 58]},
        r"'unit' of log.csv must hold texts or whole numbers, not '' \(row 1",
    ),
    "a unit in both arms": (
        {**COLUMNS, "unit": ["a", *COLUMNS["unit"][1:-1], "a"]},
        r"log.csv has rows of both arms for unit 'a': a unit is what was put into an arm",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_that_cannot_be_compared_is_refused_with_its_place(case):
    columns, message = REFUSED[case]
    csv("log.csv", columns)
    with pytest.raises(InvalidInput, match=message):
        experiment_report("log.csv")


def test_an_arm_that_is_not_there_is_no_control():
    with pytest.raises(InvalidInput, match="no arm 'x', only 'corrected', 'raw': choose one"):
        experiment_report(pa.table(COLUMNS), control="x")


def test_what_is_no_table_is_refused():
    np.save("log.npy", np.ones((3, 2)))
    for path in ("log.npy", "log.txt"):
        with pytest.raises(
            UnreadableFile, match=f"{path}: of an unknown kind; a table is a .npz, .par"
        ):
            experiment_report(path)
    with pytest.raises(InvalidInput, match="the table must be a frame of pandas, Polars or Arrow"):
        experiment_report([1, 2])
    np.savez("log.npz", unit=np.arange(3), arm=np.array(["raw", "b"]), success=np.ones(3))
    with pytest.raises(InvalidInput, match=r"log.npz has 3 units, 2 arms and 3 successes"):
        experiment_report("log.npz")
