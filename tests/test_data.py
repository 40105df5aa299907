"""The data sets of `python -m benchmarks.data`: pairs, duplicates, parts, checksums, and messages if one is missing."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks import data, docstring_code
from benchmarks.reference import measures, reference_row, sinkhorn
from benchmarks.text_to_text import Record, fold
from milvus_hubness.demo.run import Pair
from tests.support.real_data import load_task, needs_real_data, reference

ROOT = Path(__file__).parents[1]
SOURCE = '''
def {name}(values):
    """Return the sum of the values, {name} of all."""
    total = {name}_start
    for value in values:
        total += value
    return total
'''


def pairs(count, prefix="f"):
    return [
        Pair(f"{prefix}.f{i}", f"Docstring {prefix} number {i} of all.", f"return {prefix} + {i}")
        for i in range(count)
    ]


def wheel(folder, name, functions):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"{name}/code.py", "".join(SOURCE.format(name=function) for function in functions)
        )
        archive.writestr(f"{name}/tests/test_code.py", SOURCE.format(name="in_a_test"))
        archive.writestr(f"{name}-1.0.dist-info/METADATA", "Name: x")
    return path


def test_functions_are_read_from_a_wheel_without_installing_it(tmp_path):
    found = docstring_code.read_wheel(
        wheel(tmp_path, "adders", ["add", "plus"]), tmp_path / "sources"
    )
    assert [pair.name for pair in found] == ["adders.code.add", "adders.code.plus"]
    assert found[0].docstring == "Return the sum of the values, add of all."
    assert found[0].body.startswith("total = add_start")
    assert "Return the sum" not in found[0].body


def test_equal_texts_are_taken_once_whatever_their_case_and_white_space():
    [one, two] = pairs(2)
    same_docstring = Pair(
        "other.a", one.docstring.upper().replace(" ", "\n  "), "return another(body)"
    )
    same_body = Pair("other.b", "Another docstring, of some length.", two.body.replace(" ", "\t"))
    through_a_duplicate = Pair(
        "other.c", "A third docstring, of some length.", "RETURN another(BODY)"
    )
    assert docstring_code.without_duplicates([one, same_docstring, two, same_body]) == [one, two]
    assert docstring_code.without_duplicates([one, same_docstring, through_a_duplicate]) == [one]


def test_no_text_is_in_two_parts_of_the_split():
    originals = pairs(40)
    copies = [
        Pair(f"copy.{i}", pair.docstring, f"other {pair.body}") for i, pair in enumerate(originals)
    ]
    split = docstring_code.split_pairs([*originals, *copies], (10, 20, 5))
    assert [len(part) for part in split] == [10, 20, 5]
    chosen = [pair for part in split for pair in part]
    for texts in zip(*chosen, strict=True):
        assert len(set(texts)) == 35
    assert docstring_code.split_pairs([*originals, *copies], (10, 20, 5)) == split
    assert [pair.name for pair in split.test] != [pair.name for pair in originals[:10]], (
        "in random order"
    )


def test_too_few_different_pairs_are_refused():
    with pytest.raises(SystemExit, match="7 different pairs are too few: 8 are needed"):
        docstring_code.split_pairs([*pairs(7), *pairs(7)], (4, 2, 2))


def test_the_checksum_depends_on_every_text_and_its_place():
    split = docstring_code.split_pairs(pairs(6), (2, 3, 1))
    checksum = docstring_code.texts_sha256(split)
    changed = split._replace(bank=[*split.bank[:2], split.bank[2]._replace(body="pass  # changed")])
    swapped = split._replace(test=split.test[::-1])
    assert checksum == docstring_code.texts_sha256(split)
    assert len({checksum, *map(docstring_code.texts_sha256, (changed, swapped))}) == 3


def test_docstrings_and_bodies_become_the_arrays_of_the_protocol():
    split = docstring_code.split_pairs(pairs(6), (2, 3, 1))
    arrays = docstring_code.embed(
        split, lambda texts: np.array([[len(text), "return" in text] for text in texts])
    )
    assert {name: len(array) for name, array in arrays.items()} == {
        "query": 2,
        "gallery": 2,
        "bank": 3,
        "target_bank": 3,
        "val_query": 1,
        "val_gallery": 1,
    }
    assert all(array.dtype == np.float16 for array in arrays.values())
    for questions, items in (
        ("query", "gallery"),
        ("bank", "target_bank"),
        ("val_query", "val_gallery"),
    ):
        assert not arrays[questions][:, 1].any()
        assert arrays[items][:, 1].all()


def test_every_package_is_pinned_by_its_hash():
    lines = docstring_code.WHEELS.read_text().splitlines()
    assert len(lines) >= 5
    for line in lines:
        name, _, digest = line.partition(" --hash=sha256:")
        assert "==" in name
        assert len(bytes.fromhex(digest)) == 32


@pytest.fixture
def made(tmp_path):
    """A folder with a small set that was made in it."""
    rng = np.random.default_rng(0)
    sizes = {
        "query": 40,
        "gallery": 40,
        "bank": 150,
        "target_bank": 150,
        "val_query": 5,
        "val_gallery": 5,
    }
    arrays = {name: rng.normal(size=(size, 8)).astype(np.float16) for name, size in sizes.items()}
    row = data.write_set("docstring_code", arrays, tmp_path, {"texts": "abc"})
    assert json.loads((tmp_path / "reference.json").read_text()) == {"docstring_code": row}
    return tmp_path


def test_a_made_set_is_checked_against_the_hashes_of_its_making(made, capsys):
    assert data.main(["--check", "--folder", str(made)]) == 0
    assert capsys.readouterr().out.count("equal") == 6
    (made / "docstring_code" / "query.npy").write_bytes(b"another")
    (made / "docstring_code" / "bank.npy").unlink()
    assert data.main(["--check", "docstring_code", "--folder", str(made)]) == 1
    printed = capsys.readouterr().out
    assert "differs  docstring_code/query.npy" in printed
    assert "missing  docstring_code/bank.npy" in printed


def test_a_set_that_exists_is_not_made_again(made):
    with pytest.raises(SystemExit, match="docstring_code exists: remove it"):
        data.main(["docstring_code", "--folder", str(made)])


@pytest.mark.parametrize("name", [name for name in data.SETS if name != "docstring_code"])
def test_other_sets_are_described_with_their_place_licence_and_hashes(name, tmp_path, capsys):
    assert data.main([name, "--folder", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert data.SETS[name].place in printed
    assert data.SETS[name].licence in printed
    for file, digest in data.expected(name, tmp_path).items():
        assert f"{digest}  {name}/{file}" in printed
    assert data.main(["--check", name, "--folder", str(tmp_path)]) == 1
    assert set(capsys.readouterr().out.split()[::2]) == {"missing"}


def test_an_unknown_set_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        data.main(["captions"])
    assert stopped.value.code == 2
    assert "no data set 'captions': choose from docstring_code, " in capsys.readouterr().err


def test_the_folder_is_the_named_one_or_one_of_two():
    assert data.data_folder({"MILVUS_HUBNESS_DATA": "/elsewhere"}) == Path("/elsewhere")
    assert data.data_folder({}) in (ROOT / "build" / "data", ROOT.parent / "shared" / "data")


def test_a_test_of_a_missing_set_is_skipped_with_the_command(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "test_it.py").write_text(
        "from tests.support.real_data import load_task, needs_real_data, reference\n"
        "@needs_real_data\ndef test_task(): load_task('clip_products t2i')\n"
        "@needs_real_data\ndef test_reference(): reference()['docstring_code']\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-rs",
        "-p",
        "no:cacheprovider",
        "--noconftest",
        "-c",
    ]
    environment = {
        "PATH": "",
        "PYTHONPATH": str(ROOT),
        "MILVUS_HUBNESS_DATA": str(tmp_path / "data"),
    }
    done = subprocess.run(
        [*command, "/dev/null", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 skipped" in done.stdout
    for name in ("clip_products", "docstring_code"):
        assert f"no {name} in {tmp_path / 'data'}: python -m benchmarks.data {name}" in done.stdout


def test_a_benchmark_of_a_missing_set_ends_with_the_command(tmp_path):
    code = "from tests.support.real_data import load_task; load_task('text_video_msrvtt t2v')"
    environment = {"PYTHONPATH": str(ROOT), "MILVUS_HUBNESS_DATA": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert (
        done.stderr
        == f"no text_video_msrvtt in {tmp_path}: python -m benchmarks.data text_video_msrvtt\n"
    )


def test_measures_by_hand():
    scores = np.eye(12, dtype=np.float32)
    assert measures(scores)[0] == 100
    assert measures(scores[::-1].copy())[0] == 0
    assert measures(np.zeros((12, 12), np.float32))[0] == 100, "a tie counts for the query"


def test_sinkhorn_gives_both_sides_their_share():
    scores = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    scaled = np.exp((scores - sinkhorn(scores, 0.5, 200)) / 0.5)
    plan = scaled / scaled.sum(1, keepdims=True) / 6
    np.testing.assert_allclose(plan.sum(0), 1 / 4, atol=1e-4)


@needs_real_data
@pytest.mark.parametrize("task", ["text_video_msrvtt v2t", "clip_products t2i"])
def test_plain_formulas_give_the_reference_on_real_data(task):
    cells, real = reference()[task], load_task(task)
    row = reference_row(real.query, real.gallery, real.bank, real.target_bank)
    assert set(row) == set(cells)
    for method, (recall, skewness) in row.items():
        assert recall == pytest.approx(cells[method][0], abs=0.02), method
        assert skewness == pytest.approx(cells[method][1], abs=0.02), method


@needs_real_data
def test_the_real_data_here_have_the_hashes_that_are_listed():
    here = data.data_folder()
    present = [name for name in data.SETS if data.missing(name, here) is None]
    assert present
    assert {name: set(data.check(name, here).values()) for name in present} == {
        name: {"equal"} for name in present
    }


def test_texts_of_a_search_are_none_of_its_bank():
    """A message may read like another one, in one language or in the other."""
    test = [
        Record(("close", "shut"), ("schließen", "zu")),
        Record(("to",), ("zu",)),
        Record(("close",), ("nahe",)),
    ]
    other = [
        Record(("towards",), ("zu", "auf")),
        Record(("close",), ("eng",)),
        Record(("open", "public"), ("offen",)),
    ]
    texts = fold(test, other)
    assert texts.items == ["schließen", "zu", "nahe"]
    assert dict(zip(texts.queries, texts.positives, strict=True)) == {
        "close": {0, 1, 2},
        "shut": {0, 1},
        "to": {1},
    }
    assert texts.bank == ["open", "public"]
