"""Two towers over (docstring, function body) pairs: TF-IDF and truncated SVD each, a ridge map between.

The towers have never seen each other's words, so the gap between them, and with it the hubs, is real.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import Ridge
from sklearn.preprocessing import normalize

from milvus_hubness.demo.corpus import Pair
from milvus_hubness.errors import InvalidInput

DIM = 256
TRAIN, BANK = 0.4, 0.3
RIDGE_ALPHA = 0.1
MIN_PAIRS = 1000

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

Vectors = npt.NDArray[np.float32]
Positions = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Retriever:
    """Unit vectors of the test queries, the gallery and the query bank, all in the gallery's space.

    queries (n, 256) and gallery (n, 256): gallery[i] is the one right answer to queries[i].
    bank (m, 256): docstrings of functions that are neither in the gallery nor were trained on.
    names, docstrings: of the n test pairs.
    """

    queries: Vectors
    gallery: Vectors
    bank: Vectors
    names: list[str]
    docstrings: list[str]


class Split(NamedTuple):
    """Positions of the pairs in each part; no pair is in two."""

    train: Positions
    bank: Positions
    test: Positions


def split_pairs(count: int, seed: int) -> Split:
    order = np.random.default_rng(seed).permutation(count)
    return Split(*np.split(order, [int(TRAIN * count), int((TRAIN + BANK) * count)]))


def build(
    pairs: Sequence[Pair], *, seed: int = 0, progress: Callable[[str], object] | None = None
) -> Retriever:
    """Train the two towers on 40% of the pairs and embed the rest; the same pairs and seed, the same vectors.

    progress: called with a line of text as each stage begins.
    No test docstring is used to fit anything. Raises InvalidInput for fewer than 1000 pairs.
    """
    if len(pairs) < MIN_PAIRS:
        raise InvalidInput(f"{len(pairs)} documented functions are too few; training needs {MIN_PAIRS}")
    report = progress or (lambda stage: None)
    _, texts, codes = zip(*pairs, strict=True)
    split = split_pairs(len(pairs), seed)

    report("embedding docstrings")
    docstrings, known_docstring = _tower(texts, fit_on=np.r_[split.train, split.bank], seed=seed)
    report("embedding function bodies")
    bodies, known_body = _tower(codes, fit_on=np.r_[split.train, split.test], seed=seed)
    known = known_docstring & known_body
    train, bank, test = (part[known[part]] for part in split)

    report("mapping docstrings to function bodies")
    ridge = Ridge(alpha=RIDGE_ALPHA).fit(docstrings[train], bodies[train])
    return Retriever(
        queries=_unit(ridge.predict(docstrings[test])),
        gallery=_unit(bodies[test]),
        bank=_unit(ridge.predict(docstrings[bank])),
        names=[pairs[i].name for i in test],
        docstrings=[pairs[i].docstring for i in test],
    )


def words(text: str) -> list[str]:
    """Lower-case words; identifiers are split at underscores and case: "HTTPServer_bind" has three."""
    return [word.lower() for word in WORD.findall(text)]


def _tower(
    texts: Sequence[str], *, fit_on: Positions, seed: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Unit vectors (n, 256) of the texts, and which of the texts (n,) have a word the tower knows."""
    tfidf = TfidfVectorizer(tokenizer=words, token_pattern=None, lowercase=False, min_df=2, sublinear_tf=True)
    tfidf.fit([texts[i] for i in fit_on])
    weights = tfidf.transform(texts)
    svd = TruncatedSVD(DIM, random_state=seed).fit(weights[fit_on])
    return normalize(svd.transform(weights)), weights.getnnz(axis=1) > 0


def _unit(vectors: npt.NDArray[np.float64]) -> Vectors:
    return np.asarray(normalize(vectors), dtype=np.float32)
