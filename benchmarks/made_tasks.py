"""Tasks that are made here: encoders that suit their texts badly, and recommenders.

Each takes seconds, from what is installed: names of languages, places and currencies in two languages, which Babel has
from the CLDR; functions of the standard library; and which modules the files of the installed packages import. The texts
differ between versions, so figures differ by some tenths. Nothing is trained on the pairs of a task.

Unsuited encoders are what many people have: character trigrams, and means of word vectors that nobody trained. Frequent
words and letters then pull all texts in the same directions, and few items answer nearly all queries. In a recommender a
file is a user, and a module that it imports an item: popular items answer many users, rightly.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.random_projection import GaussianRandomProjection

from milvus_hubness.demo.run import collect
from tests.support.real_data import Task

Vectors = npt.NDArray[np.float32]

LANGUAGES = {"French": "fr", "Dutch": "nl", "German": "de", "Spanish": "es", "Italian": "it", "Swedish": "sv"}  # fmt: skip
FUNCTIONS = 6_000
DIM = 256
FACTORS = 64
"""Dimensions of a recommender."""
FEWEST_IMPORTS, FEWEST_FILES = 5, 4
"""Of a file, one of which is to be recommended; and of a module."""
USERS = 4_000

UNSUITED = (
    *(f"{language} to English, trigrams" for language in LANGUAGES),
    "docstring to code, words",
    "docstring to code, trigrams",
    "code to docstring, words",
    "code to docstring, trigrams",
    "name to docstring, words",
    "name to code, trigrams",
)
RECOMMENDERS = ("factors of counts", "factors of weighted counts", "factors of unit length")


def unsuited(name: str) -> Task:
    """Return one of UNSUITED; half of its pairs are the bank and the target bank."""
    texts, _, encoder = name.partition(", ")
    source, _, target = texts.partition(" to ")
    if source in LANGUAGES:
        queries, items = zip(*names_in(LANGUAGES[source]), strict=True)
    else:
        queries, items = texts_of(source), texts_of(target)

    encode = trigrams if encoder == "trigrams" else words
    return halves(encode(queries), encode(items))


def halves(queries: Vectors, items: Vectors) -> Task:
    order = np.random.default_rng(0).permutation(len(queries))
    test, other = np.array_split(order, 2)
    return Task(queries[test], items[test], queries[other], items[other], np.arange(len(test)))


@cache
def names_in(language: str) -> tuple[tuple[str, str], ...]:
    """Return pairs of a name in a language and in English; no name occurs twice, none is the same in both."""
    english, others = display_names("en"), display_names(language)
    pairs = []
    seen: set[str] = set()
    for key in sorted(others.keys() & english.keys()):
        pair = others[key], english[key]
        lower = {text.lower() for text in pair}
        if len(lower) == 2 and seen.isdisjoint(lower):
            seen |= lower
            pairs.append(pair)
    return tuple(pairs)


def display_names(language: str) -> dict[tuple[str, str], str]:
    from babel import Locale

    locale = Locale.parse(language)
    kinds = ("languages", "territories", "scripts", "currencies", "variants")
    names = {(kind, str(key)): str(text) for kind in kinds for key, text in getattr(locale, kind).items()}  # fmt: skip
    cities = {("city", key): str(zone["city"]) for key, zone in locale.time_zones.items() if "city" in zone}  # fmt: skip
    return names | cities


@cache
def functions() -> tuple[tuple[str, str, str], ...]:
    """Return names, docstrings and bodies of functions of the standard library."""
    pairs = collect()
    chosen = np.random.default_rng(0).permutation(len(pairs))[:FUNCTIONS]
    return tuple(tuple(pairs[number]) for number in np.sort(chosen))


def texts_of(what: str) -> list[str]:
    column = ("name", "docstring", "code").index(what)
    return [function[column] for function in functions()]


def trigrams(texts: Iterable[str]) -> Vectors:
    """Return unit vectors (n, DIM) of texts by their characters, projected at random."""
    hashed = HashingVectorizer(analyzer="char_wb", ngram_range=(3, 3), n_features=2**18, norm=None)
    counts = hashed.transform(text.lower() for text in texts)
    return unit(GaussianRandomProjection(DIM, random_state=0).fit_transform(counts))


def words(texts: Sequence[str]) -> Vectors:
    """Return unit vectors (n, DIM) of texts: means of random vectors, one for each word."""
    vectors: dict[str, Vectors] = {}
    rows = np.zeros((len(texts), DIM), np.float32)
    for row, text in zip(rows, texts, strict=True):
        in_words = re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower()
        for word in re.findall(r"[a-z]+", in_words):
            if word not in vectors:
                rng = np.random.default_rng(zlib.crc32(word.encode()))
                vectors[word] = rng.standard_normal(DIM, np.float32)
            row += vectors[word]
    return unit(rows)


def unit(rows: npt.ArrayLike) -> Vectors:
    array = np.asarray(rows, np.float32)
    lengths = np.linalg.norm(array, axis=1, keepdims=True)
    return np.asarray(array / np.where(lengths > 0, lengths, 1), np.float32)


def recommender(name: str) -> Task:
    """Return one of RECOMMENDERS: users are the queries, and each is to find a module that it imports and that the
    factors have not seen. Half of the users are the bank."""
    counts, held = imports()
    matrix = counts.copy()
    if name != "factors of counts":
        # Weights as for words: what everybody imports says little.
        matrix = matrix.multiply(np.log(counts.shape[0] / (1 + counts.sum(0)))).tocsr()

    decomposed = TruncatedSVD(FACTORS, random_state=0)
    users = np.asarray(decomposed.fit_transform(matrix), np.float32)
    items = np.asarray(decomposed.components_.T, np.float32)
    if name == "factors of unit length":
        users, items = unit(users), unit(items)

    test, bank = np.array_split(np.random.default_rng(0).permutation(len(users)), 2)
    return Task(users[test], items, users[bank], None, held[test])


@cache
def imports() -> tuple[csr_matrix, npt.NDArray[np.int64]]:
    """Return which of n files imports which module, (n, modules), without one import of each, and that import, (n,)."""
    folder = Path(sysconfig.get_path("purelib"))
    files = [modules for path in sorted(folder.rglob("*.py")) if len(modules := imported(path)) >= FEWEST_IMPORTS]  # fmt: skip
    names, counts = np.unique(np.concatenate([sorted(modules) for modules in files]), return_counts=True)  # fmt: skip
    number_of = {name: number for number, name in enumerate(names[counts >= FEWEST_FILES])}

    rng = np.random.default_rng(0)
    rows, columns, held = [], [], []
    for modules in (files[number] for number in rng.permutation(len(files))):
        numbers = sorted(number_of[name] for name in modules if name in number_of)
        if len(numbers) < FEWEST_IMPORTS or len(held) == USERS:
            continue
        left_out = int(rng.integers(len(numbers)))
        columns += numbers[:left_out] + numbers[left_out + 1 :]
        rows += [len(held)] * (len(numbers) - 1)
        held.append(numbers[left_out])

    shape = len(held), len(number_of)
    return csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape), np.array(held)


def imported(path: Path) -> set[str]:
    """Return the names of the modules that a file imports; of files that cannot be read none."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names
