"""Tasks that are made here: encoders that suit their texts badly, and recommenders.

They need nothing but what is installed: names of languages, places and currencies in two
languages, which Babel has from the CLDR; functions of the standard library; and which modules the
files of the installed packages import, which takes minutes to read. These differ between versions,
and the figures with them.
Nothing is trained on the pairs of a task, and recommenders not on what they are to find.

An encoder is the mean of random vectors, one for each word or for each three letters of a text. Frequent
words then pull all texts in the same directions, and few items answer nearly all queries. In a
recommender a file is a user, and a module that it imports an item: popular items answer many users,
and rightly.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import csr_matrix
from sklearn.decomposition import TruncatedSVD

from milvus_hubness.demo.run import collect
from tests.support.real_data import Task

Vectors = npt.NDArray[np.float32]

LANGUAGES = {"French": "fr", "Dutch": "nl", "German": "de", "Italian": "it"}
FUNCTIONS = 6_000
DIM = 256

UNSUITED = (
    *(f"{language} to English, trigrams" for language in LANGUAGES),
    "docstring to code, words",
    "docstring to code, trigrams",
    "code to docstring, words",
    "code to docstring, trigrams",
    "name to docstring, words",
    "name to code, trigrams",
)

RECOMMENDERS = (
    "factors of counts",
    "factors of weighted counts",
    "factors of unit length",
    "alternating least squares",
    "alternating least squares, unit length",
    "pairwise ranking",
    "pairwise ranking, unit length",
)
FACTORS = 64
ROUNDS = 8
"""Of alternating least squares."""
CONFIDENCE = 20.0
"""The weight of what was imported, in alternating least squares."""
RIDGE = 5.0
"""The weight of the vectors' lengths there."""
EPOCHS = 15
"""Of pairwise ranking."""
USERS = 4_000
FEWEST_IMPORTS = 5
"""Of a file; one of them is to be recommended."""
FEWEST_FILES = 4
"""That import a module."""


def unsuited(name: str) -> Task:
    """Return one of UNSUITED; half of its pairs are the bank and the target bank."""
    texts, _, encoder = name.partition(", ")
    source, _, target = texts.partition(" to ")
    queries: Sequence[str]
    items: Sequence[str]
    if source in LANGUAGES:
        queries, items = zip(*names_in(LANGUAGES[source]), strict=True)
    else:
        queries = texts_of(source)
        items = texts_of(target)

    tokens = letters if encoder == "trigrams" else words
    return halves(encoded(queries, tokens), encoded(items, tokens))


def halves(queries: Vectors, items: Vectors) -> Task:
    order = np.random.default_rng(0).permutation(len(queries))
    test, other = np.array_split(order, 2)
    return Task(queries[test], items[test], queries[other], items[other], np.arange(len(test)))


@cache
def names_in(language: str) -> tuple[tuple[str, str], ...]:
    """Return pairs of a name in a language and in English.

    No name occurs twice, and none is the same in both.
    """
    in_english = display_names("en")
    in_other = display_names(language)
    pairs = []
    seen: set[str] = set()
    for key in sorted(in_other.keys() & in_english.keys()):
        pair = in_other[key], in_english[key]
        lower = {text.lower() for text in pair}
        if len(lower) == 2 and seen.isdisjoint(lower):
            seen |= lower
            pairs.append(pair)
    return tuple(pairs)


def display_names(language: str) -> dict[tuple[str, str], str]:
    from babel import Locale

    locale = Locale.parse(language)
    names = {
        (kind, str(key)): str(text)
        for kind in ("languages", "territories", "scripts", "currencies", "variants")
        for key, text in getattr(locale, kind).items()
    }
    for key, zone in locale.time_zones.items():
        if "city" in zone:
            names["city", key] = str(zone["city"])
    return names


@cache
def functions() -> tuple[Any, ...]:
    """Return functions of the standard library: names, docstrings and bodies."""
    pairs = collect()
    chosen = np.random.default_rng(0).permutation(len(pairs))[:FUNCTIONS]
    return tuple(pairs[number] for number in np.sort(chosen))


def texts_of(what: str) -> list[str]:
    column = ("name", "docstring", "code").index(what)
    return [function[column] for function in functions()]


def words(text: str) -> list[str]:
    apart = re.sub(r"([a-z])([A-Z])", r"\1 \2", text)
    return re.findall(r"[a-z]+", apart.lower())


def letters(text: str) -> list[str]:
    """Return each three letters that follow each other."""
    plain = " ".join(text.lower().split())
    return [plain[start : start + 3] for start in range(max(1, len(plain) - 2))]


def encoded(texts: Sequence[str], tokens: Callable[[str], list[str]]) -> Vectors:
    """Return unit vectors (n, DIM) of texts: means of random vectors, one for each token."""
    vectors: dict[str, Vectors] = {}
    rows = np.zeros((len(texts), DIM), np.float32)
    for row, text in zip(rows, texts, strict=True):
        for token in tokens(text):
            if token not in vectors:
                rng = np.random.default_rng(zlib.crc32(token.encode()))
                vectors[token] = rng.standard_normal(DIM, np.float32)
            row += vectors[token]
    return unit(rows)


def unit(rows: npt.ArrayLike) -> Vectors:
    array = np.asarray(rows, np.float32)
    lengths = np.linalg.norm(array, axis=1, keepdims=True)
    return np.asarray(array / np.where(lengths > 0, lengths, 1), np.float32)


def recommender(name: str) -> Task:
    """Return one of RECOMMENDERS; half of the users are the bank.

    Each user is a query, and is to find a module that it imports and the factors have not seen.
    """
    counts, left_out = imports()
    if name.startswith("alternating"):
        users, items = alternating_least_squares(counts)
    elif name.startswith("pairwise"):
        users, items = pairwise_ranking(counts)
    else:
        users, items = factors(counts, weighted=name != "factors of counts")
    if name.endswith("unit length"):
        users = unit(users)
        items = unit(items)

    test, bank = np.array_split(np.random.default_rng(0).permutation(len(users)), 2)
    return Task(users[test], items, users[bank], None, left_out[test])


def factors(counts: Any, *, weighted: bool) -> tuple[Vectors, Vectors]:
    """Return users (n, FACTORS) and items (modules, FACTORS) of a truncated SVD."""
    matrix = counts
    if weighted:
        # As with words: what everybody imports says little.
        files = np.asarray(counts.sum(0))
        matrix = counts.multiply(np.log(counts.shape[0] / (1 + files))).tocsr()
    decomposed = TruncatedSVD(FACTORS, random_state=0)
    users = np.asarray(decomposed.fit_transform(matrix), np.float32)
    return users, np.asarray(decomposed.components_.T, np.float32)


def alternating_least_squares(counts: Any) -> tuple[Vectors, Vectors]:
    """Return users and items of implicit feedback (Hu, Koren, Volinsky, ICDM 2008, eq. 4 and 5)."""
    rng = np.random.default_rng(0)
    items = 0.05 * rng.standard_normal((counts.shape[1], FACTORS), np.float32)
    by_item = counts.T.tocsr()
    for _ in range(ROUNDS):
        users = least_squares(counts, items)
        items = least_squares(by_item, users)
    return users, items


def least_squares(counts: Any, others: Vectors) -> Vectors:
    """Return the vector of each row that explains its counts best, given those of the columns."""
    everywhere = others.T @ others + RIDGE * np.eye(FACTORS, dtype=np.float32)
    solved = np.zeros((counts.shape[0], FACTORS), np.float32)
    for row in range(counts.shape[0]):
        columns = counts.indices[counts.indptr[row] : counts.indptr[row + 1]]
        chosen = others[columns]
        weighted = everywhere + CONFIDENCE * chosen.T @ chosen
        solved[row] = np.linalg.solve(weighted, (1 + CONFIDENCE) * chosen.sum(0))
    return solved


def pairwise_ranking(counts: Any) -> tuple[Vectors, Vectors]:
    """Return users and items of Bayesian personalised ranking (Rendle et al., UAI 2009)."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    user_count, item_count = counts.shape
    users = torch.nn.Parameter(0.1 * torch.randn(user_count, FACTORS))
    items = torch.nn.Parameter(0.1 * torch.randn(item_count, FACTORS))
    optimizer = torch.optim.Adam([users, items], lr=0.02)

    rows = torch.from_numpy(np.repeat(np.arange(user_count), np.diff(counts.indptr)))
    columns = torch.from_numpy(counts.indices.astype(np.int64))
    for _ in range(EPOCHS):
        for part in torch.from_numpy(rng.permutation(len(rows))).split(8192):
            user = users[rows[part]]
            item = items[columns[part]]
            other = items[torch.from_numpy(rng.integers(item_count, size=len(part)))]
            lead = (user * (item - other)).sum(1)
            size = user.pow(2).sum(1) + item.pow(2).sum(1)
            loss = -torch.nn.functional.logsigmoid(lead).mean() + 1e-4 * size.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return users.detach().numpy(), items.detach().numpy()


@cache
def imports() -> tuple[Any, npt.NDArray[np.int64]]:
    """Return which of n files imports which module, (n, modules), and one import of each, (n,), which is
    not among these.
    """
    folder = Path(sysconfig.get_path("purelib"))
    of_files = [imported(path) for path in sorted(folder.rglob("*.py"))]
    names, counts = np.unique(
        [name for of_file in of_files for name in of_file], return_counts=True
    )
    number_of = {name: number for number, name in enumerate(names[counts >= FEWEST_FILES])}

    rng = np.random.default_rng(0)
    rows: list[int] = []
    columns: list[int] = []
    left_out: list[int] = []
    for file_number in rng.permutation(len(of_files)):
        modules = sorted(number_of[name] for name in of_files[file_number] if name in number_of)
        if len(modules) < FEWEST_IMPORTS or len(left_out) == USERS:
            continue
        left_out.append(modules.pop(int(rng.integers(len(modules)))))
        rows += [len(left_out) - 1] * len(modules)
        columns += modules

    shape = len(left_out), len(number_of)
    return csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape), np.array(left_out)


def imported(path: Path) -> set[str]:
    """Return the names that a file imports from other packages; of files that cannot be read none."""
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
