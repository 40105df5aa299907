"""Tasks with encoders of texts that suit them badly: words without context, hashed letters, English only.

    pip install wordllama django babel          # and for MiniLM: pip install --group data

Texts are the messages of Django's interface in two languages, names as Babel has them from the CLDR, and
functions of the standard library. Encoders:

wordllama   the mean of the vectors of a text's tokens, for English; its authors trained them
MiniLM      all-MiniLM-L6-v2, a transformer for English
static      the mean of word vectors that are made here: which words stand in one docstring, weighted by
            positive pointwise mutual information, and 200 singular vectors of that. Codes and names of
            functions, the other side of each pair, are not read
hashed      each three to five letters of a word add 1 or −1 to one of 512 numbers

None is trained on the pairs of a task. The figures change with the versions of the packages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import HashingVectorizer

from benchmarks.docstring_code import sentence_model
from benchmarks.made_tasks import functions, halves, texts_of, unit, words
from benchmarks.text_to_text import (
    different,
    django_messages,
    docstrings,
    names,
    summary_and_rest,
    wordllama,
)
from tests.support.real_data import Task

Vectors = npt.NDArray[np.float32]
Encoder = Callable[[Sequence[str]], Vectors]

TEXT_TASKS = (
    "Polish to English, wordllama",
    "Swedish to English, wordllama",
    "Turkish to English, hashed",
    "Portuguese to English, MiniLM",
    "docstring to code, static",
    "docstring to code, wordllama",
    "summary to rest, hashed",
    "code to docstring, hashed",
    "Spanish to English, wordllama",
    "Spanish to Portuguese, hashed",
    "name to docstring, static",
    "name to code, wordllama",
)
LANGUAGES = {
    "English": "en",
    "Polish": "pl",
    "Portuguese": "pt",
    "Spanish": "es",
    "Swedish": "sv",
    "Turkish": "tr",
}
MOST_PAIRS = 3_000
HASHED_DIM = 512
STATIC_DIM = 200
FEWEST_TEXTS = 5
"""Docstrings with a word that has a vector."""


def text_task(name: str) -> Task:
    """Return one of TEXT_TASKS; half of its pairs are the bank and the target bank."""
    texts, _, encoder = name.partition(", ")
    pairs = pairs_of(texts)
    chosen = np.random.default_rng(0).permutation(len(pairs))[:MOST_PAIRS]
    queries, items = zip(*(pairs[number] for number in chosen), strict=True)
    encode = ENCODERS[encoder]()
    return halves(encode(queries), encode(items))


def pairs_of(texts: str) -> list[tuple[str, str]]:
    """Return a query and its item, each text once."""
    source, _, target = texts.partition(" to ")
    rows: list[list[str]]
    if source in LANGUAGES:
        languages = LANGUAGES[source], LANGUAGES[target]
        rows = django_messages(*languages) + names(*languages)
    elif source == "summary":
        rows = different([list(summary_and_rest(text)) for text in docstrings()])
    else:
        rows = different(
            [list(pair) for pair in zip(texts_of(source), texts_of(target), strict=True)]
        )

    pairs = []
    seen: tuple[set[str], set[str]] = set(), set()
    for query, item in rows:
        if query not in seen[0] and item not in seen[1]:
            seen[0].add(query)
            seen[1].add(item)
            pairs.append((query, item))
    return pairs


def hashed() -> Encoder:
    vectorizer = HashingVectorizer(
        analyzer="char_wb", ngram_range=(3, 5), n_features=HASHED_DIM, norm=None
    )
    return lambda texts: unit(vectorizer.transform(texts).toarray())


@cache
def word_vectors() -> dict[str, Vectors]:
    """Return the static vectors of words that occur in several docstrings."""
    texts = [words(function[1]) for function in functions()]
    counted, counts = np.unique([word for text in texts for word in set(text)], return_counts=True)
    vocabulary = counted[counts >= FEWEST_TEXTS].tolist()
    number_of = {word: number for number, word in enumerate(vocabulary)}

    rows, columns = [], []
    for row, text in enumerate(texts):
        known = sorted({number_of[word] for word in text if word in number_of})
        rows += [row] * len(known)
        columns += known
    shape = len(texts), len(vocabulary)
    occurs = csr_matrix((np.ones(len(rows)), (rows, columns)), shape)

    together = (occurs.T @ occurs).tocoo()
    frequency = np.asarray(occurs.mean(0)).ravel()
    by_chance = len(texts) * frequency[together.row] * frequency[together.col]
    information = np.maximum(0, np.log(together.data / by_chance))
    weighted = csr_matrix((information, (together.row, together.col)))
    vectors = TruncatedSVD(STATIC_DIM, random_state=0).fit_transform(weighted)
    return dict(zip(vocabulary, vectors.astype(np.float32), strict=True))


def static() -> Encoder:
    vectors = word_vectors()
    nothing = np.zeros(STATIC_DIM, np.float32)

    def encode(texts: Sequence[str]) -> Vectors:
        means = [sum((vectors[w] for w in words(text) if w in vectors), nothing) for text in texts]
        return unit(np.stack(means))

    return encode


ENCODERS: dict[str, Callable[[], Encoder]] = {
    "wordllama": wordllama,
    "MiniLM": sentence_model,
    "static": static,
    "hashed": hashed,
}
