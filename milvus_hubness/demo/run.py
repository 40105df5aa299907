"""The run of the demo: build a retriever, load, search, migrate, and search again.

The retriever finds functions of the standard library by their docstrings. It has a tower for each
side, and neither has seen the words of the other: the gap between them, and with it the hubs, is
real.
"""

from __future__ import annotations

import ast
import os
import re
import sysconfig
import textwrap
import time
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pymilvus import DataType, MilvusClient
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import Ridge
from sklearn.preprocessing import normalize

from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import NNN
from milvus_hubness.errors import InvalidInput, NoMigration, UnreadableFile
from milvus_hubness.jobs.common.lease import forget_leases
from milvus_hubness.jobs.common.progress import chunks
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.migration.clean import clean
from milvus_hubness.jobs.migration.run import migrate
from milvus_hubness.jobs.plan import plan_correction
from milvus_hubness.jobs.store.ownership import LEDGER
from milvus_hubness.milvus.client.sync import HubnessClient
from milvus_hubness.milvus.store.milvus_store import MilvusStore
from milvus_hubness.milvus.store.server import connect
from milvus_hubness.quality.measures import k_occurrence, skewness

TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
"""Folders without functions that are worth a question."""
MIN_DOCSTRING_CHARS = 30
MIN_BODY_CHARS = 60
"""Shorter ones fit many answers, or none."""


class Pair(NamedTuple):
    """A question and its one right answer."""

    name: str
    """Of the function: "module.Class.function"."""
    docstring: str
    """The question."""
    body: str
    """The answer: the source text after the docstring."""

    @staticmethod
    def words(text: str) -> list[str]:
        """Return the words of a text in lower case.

        Identifiers are split at underscores and case: "HTTPServer_bind" has three words.
        """
        return [word.lower() for word in WORD.findall(text)]


@cache
def collect(root: Path | None = None) -> tuple[Pair, ...]:
    """Return every documented function under `root`, in a fixed order.

    root: the standard library by default. Of equal names, docstrings or bodies the first counts:
    each question has one right answer. Raises UnreadableFile if no function is documented, as on a
    Python that ships without its sources.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    pairs: list[Pair] = []
    seen: set[str] = set()
    for path in _source_files(root):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for pair in _functions(path, module):
            if seen.isdisjoint(pair):
                seen.update(pair)
                pairs.append(pair)

    if not pairs:
        raise UnreadableFile(f"no source files with documented functions under {root}")

    return tuple(pairs)


def _source_files(root: Path) -> Iterator[Path]:
    """Yield the importable files.

    Paths that are no identifiers, such as site-packages, and tests are left out.
    """
    for folder, subfolders, files in os.walk(root):
        # In place, which is how `os.walk` learns where to go; sorted, for an order that is fixed.
        subfolders[:] = sorted(filter(str.isidentifier, set(subfolders) - TEST_FOLDERS))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _functions(path: Path, module: str) -> Iterator[Pair]:
    # Some files of the standard library are faulty on purpose.
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = file.read()
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return
    yield from _walk(tree, module, source.split("\n"))


def _walk(node: ast.AST, prefix: str, lines: list[str]) -> Iterator[Pair]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue

        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _walk(child, prefix, lines)
            continue

        name = f"{prefix}.{child.name}"
        if not isinstance(child, ast.ClassDef):
            docstring = ast.get_docstring(child) or ""
            # From the end of the first statement, which is the docstring if there is one.
            after_docstring = lines[child.body[0].end_lineno : child.end_lineno]
            body = textwrap.dedent("\n".join(after_docstring)).strip()
            if len(docstring) >= MIN_DOCSTRING_CHARS and len(body) >= MIN_BODY_CHARS:
                yield Pair(name, docstring, body)

        yield from _walk(child, name, lines)


DIM = 256
TRAIN = 0.4
"""Share of the pairs that the towers and the map between them are trained on."""
BANK = 0.3
"""Share of the pairs whose docstrings are the bank. The others are the test."""
RIDGE_ALPHA = 0.1
MIN_PAIRS = 1000
STAGES = 3
"""Steps of `build` that the progress counts."""

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

Vectors = npt.NDArray[np.float32]
Positions = npt.NDArray[np.intp]


class Retriever(NamedTuple):
    """The vectors of a retriever and of its test. All are unit vectors."""

    queries: Vectors
    """(n, 256): the queries of the n test pairs."""
    gallery: Vectors
    """(n, 256): item i is the one right answer to query i."""
    bank: Vectors
    """(m, 256): docstrings of functions that are neither in the gallery nor were trained on."""
    names: list[str]
    """The functions of the n test pairs."""
    docstrings: list[str]
    """The docstrings of the n test pairs."""


def split_pairs(count: int, seed: int) -> list[Positions]:
    """Return the disjoint positions of the pairs to train on, of the bank and of the test."""
    order = np.random.default_rng(seed).permutation(count)
    return np.split(order, [int(TRAIN * count), int((TRAIN + BANK) * count)])


def build(pairs: Sequence[Pair], *, seed: int = 0, progress: Progress = silent) -> Retriever:
    """Train the two towers on 40% of the pairs, and embed the rest.

    Equal pairs and seed give equal vectors. Raises InvalidInput for fewer than 1000 pairs.
    """
    if len(pairs) < MIN_PAIRS:
        raise InvalidInput(
            f"{len(pairs)} documented functions are too few; training needs {MIN_PAIRS}"
        )

    _, texts, codes = zip(*pairs, strict=True)
    train, bank, test = split_pairs(len(pairs), seed)

    # The tower of docstrings never sees the test's questions, and that of bodies not the answers of
    # the bank: a gallery's own items may be seen, since they are there before any query.
    progress("embedding docstrings", 1, STAGES)
    docstrings, has_docstring = _tower(texts, fit_on=np.r_[train, bank], seed=seed)
    progress("embedding function bodies", 2, STAGES)
    bodies, has_body = _tower(codes, fit_on=np.r_[train, test], seed=seed)

    # A text without a word that its tower has seen is a zero vector, which has no direction.
    has_both = has_docstring & has_body
    train, bank, test = (pairs_of[has_both[pairs_of]] for pairs_of in (train, bank, test))

    progress("mapping docstrings to function bodies", 3, STAGES)
    ridge = Ridge(alpha=RIDGE_ALPHA).fit(docstrings[train], bodies[train])
    return Retriever(
        queries=_unit(ridge.predict(docstrings[test])),
        gallery=_unit(bodies[test]),
        bank=_unit(ridge.predict(docstrings[bank])),
        names=[pairs[i].name for i in test],
        docstrings=[pairs[i].docstring for i in test],
    )


def _tower(
    texts: Sequence[str], *, fit_on: Positions, seed: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return unit vectors (n, 256) of the texts.

    The second value is (n,) whether a text has a word of those that the tower was fitted on.
    """
    tfidf = TfidfVectorizer(
        tokenizer=Pair.words, token_pattern=None, lowercase=False, min_df=2, sublinear_tf=True
    )
    tfidf.fit([texts[i] for i in fit_on])
    weights = tfidf.transform(texts)
    svd = TruncatedSVD(DIM, random_state=seed).fit(weights[fit_on])
    return normalize(svd.transform(weights)), weights.getnnz(axis=1) > 0


def _unit(vectors: npt.NDArray[np.float64]) -> Vectors:
    return np.asarray(normalize(vectors), dtype=np.float32)


ESTIMATOR = NNN(k=16, alpha=0.75)
TOP = 10
BATCH = 500
"""Rows of an insert, and queries of a search."""
EXAMPLES = 5
"""Questions that are shown."""


def run(
    uri: str, *, keep: bool = False, progress: Progress = silent, **access: Any
) -> dict[str, Any]:
    """Load the retriever's gallery into Milvus, measure before and after, and return plain data.

    raw, corrected: r1, r5 and r10 in percent, skewness of N_10, and the seconds to search all
    queries. keep: leave the collections in the database. access: further arguments of a MilvusClient,
    such as its token. Raises ServerUnavailable, StoreError,
    UnreadableFile.
    """
    began = time.perf_counter()
    # An address that leads nowhere shows now, not after the training.
    connect(uri, create=True, **access).close()
    retriever = build(collect(), progress=progress)
    plain = connect(uri, **access)
    store = MilvusStore(plain)
    # Of its own: the database may be a real one.
    name = f"hubness_demo_{os.getpid():x}_{int(time.time()):x}"
    had_ledger = store.exists(LEDGER)

    try:
        _load(plain, name, retriever, progress)
        before, raw = _measure(plain, name, retriever, "searching as it is", progress)
        bank = QueryBank(retriever.bank, source="Python standard library")
        plan = plan_correction(store, name, Recipe(bank, estimator=ESTIMATOR))
        target = migrate(store, plan, progress=progress, no_writers=True).target

        with_correction = HubnessClient(uri, **access)
        after, corrected = _measure(
            with_correction, target, retriever, "searching corrected", progress
        )
        with_correction.close()
    finally:
        if not keep:
            _drop(store, name, had_ledger)

    return {
        "server": plain.get_server_version(),
        "queries": len(retriever.queries),
        "gallery": len(retriever.gallery),
        "bank": len(retriever.bank),
        "dim": retriever.gallery.shape[1],
        "estimator": f"NNN(k={ESTIMATOR.k}, alpha={ESTIMATOR.alpha})",
        "raw": raw,
        "corrected": corrected,
        "examples": _examples(retriever, before[:, 0], after[:, 0]),
        "collection": name,
        "corrected_collection": target,
        "kept": keep,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _drop(store: MilvusStore, name: str, had_ledger: bool) -> None:
    """Drop the collections of the demo, and its records in the ledger."""
    copy = f"{name}_hubness"
    with suppress(NoMigration):
        clean(store, name, drop=copy)

    if store.exists(name):
        store.drop(name)

    # A ledger that was there before has records of others.
    if had_ledger:
        forget_leases(store, name, copy)
    elif store.exists(LEDGER):
        store.drop(LEDGER)


def _load(client: MilvusClient, name: str, retriever: Retriever, progress: Progress) -> None:
    schema = client.create_schema()
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=retriever.gallery.shape[1])
    schema.add_field("name", DataType.VARCHAR, max_length=512)
    index = client.prepare_index_params("vector", index_type="FLAT", metric_type="COSINE")
    client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")
    functions = zip(retriever.gallery, retriever.names, strict=True)
    rows = [
        {"id": i, "vector": vector, "name": function}
        for i, (vector, function) in enumerate(functions)
    ]
    for batch in chunks(rows, BATCH, "loading the gallery", progress):
        client.insert(name, list(batch))


def _measure(
    client: MilvusClient, collection: str, retriever: Retriever, doing: str, progress: Progress
) -> tuple[npt.NDArray[np.int64], dict[str, float]]:
    """Search all queries; return the keys (n, 10) of the results, and their measures.

    The keys of a query are best first.
    """
    keys: list[list[int]] = []
    seconds = 0.0
    for queries in chunks(list(retriever.queries), BATCH, doing, progress):
        began = time.perf_counter()
        results = client.search(collection, data=list(queries), limit=TOP, output_fields=["id"])
        seconds += time.perf_counter() - began
        keys += [[hit["id"] for hit in hits] for hits in results]

    retrieved = np.array(keys)
    is_right = retrieved == np.arange(len(retrieved))[:, None]
    measures = {f"r{k}": round(100 * float(is_right[:, :k].any(1).mean()), 2) for k in (1, 5, 10)}
    skew = skewness(k_occurrence(retrieved, len(retriever.gallery), TOP))

    return retrieved, {**measures, "skewness": round(skew, 2), "seconds": round(seconds, 2)}


def _examples(retriever: Retriever, before: Positions, after: Positions) -> list[dict[str, str]]:
    """Return questions that the correction fixes, those first that the worst hubs had taken."""
    # How many queries had each item first.
    counts = np.bincount(before, minlength=len(retriever.names))
    repaired = np.flatnonzero((after == np.arange(len(after))) & (before != after))
    # One example for each hub.
    examples: dict[str, dict[str, str]] = {}
    for i in repaired[np.argsort(-counts[before[repaired]], kind="stable")].tolist():
        wrong = retriever.names[before[i]]
        question = retriever.docstrings[i].strip().splitlines()[0]
        example = {"question": question, "before": wrong, "after": retriever.names[i]}
        examples.setdefault(wrong, example)

    return list(examples.values())[:EXAMPLES]
