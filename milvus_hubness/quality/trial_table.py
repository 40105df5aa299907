"""The table of a raw search and of trials, as text, for LaTeX, for pandas and for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from milvus_hubness.basics.notebooks import table
from milvus_hubness.basics.texts import chosen_parameters, describe, in_points
from milvus_hubness.correction.estimators import Estimator
from milvus_hubness.quality import measures, outcomes
from milvus_hubness.quality.labelled import LabelledQueries
from milvus_hubness.quality.trials import Trial

SHOWN_ROWS = 5
"""Searches in the table of a notebook and of a paper, with the raw one."""
RESAMPLES = 1000


class Row(NamedTuple):
    """One trial, as the table of a tuning shows it."""

    estimator: Estimator | None
    """None for the raw search."""
    strength: float
    excess_answers: float
    """Share of the answers that hubs take in excess."""
    value: float | None
    """Of the measure; None without labels."""
    gain: measures.Interval | None
    """Of the measure over the raw search, with its 95% interval; None without labels."""
    gate: int | None = None
    kinds: bool = False
    """Whether the search compares by kind."""


class TrialTable:
    """A result with a row for the raw search, then one for each trial."""

    rows: tuple[Row, ...]
    measure: str

    def to_frame(self) -> Any:
        """Return the raw search and the trials, best first, as a frame of pandas.

        Its columns are method, strength, gate, the measure, low and high, the 95% interval of its gain
        over the raw search, and excess_answers; shares are from 0 to 1, NaN where there is none.
        """
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "method": in_words(row.estimator) if row.estimator else "as it is",
                    "strength": row.strength,
                    "gate": row.gate,
                    self.measure: row.value,
                    "low": row.gain.low if row.gain and row.estimator else None,
                    "high": row.gain.high if row.gain and row.estimator else None,
                    "excess_answers": row.excess_answers,
                }
                for row in self.rows
            ]
        ).astype(dict.fromkeys(("gate", self.measure, "low", "high"), float))

    def to_latex(self, rows: int = SHOWN_ROWS) -> str:
        """Return the raw search and the best trials, `rows` in all, as a table of LaTeX with booktabs.

        Shares are in percent, and the gain is the 95% interval of that over the raw search.
        """
        lines = [
            r"\begin{tabular}{lrrrr}",
            r"\toprule",
            rf"method & strength & {latex_of(self.measure)} & gain & excess answers \\",
            r"\midrule",
        ]
        for row in self.rows[:rows]:
            gain = ""
            if row.estimator and row.gain:
                gain = f"${100 * row.gain.low:+.1f}$ to ${100 * row.gain.high:+.1f}$"
            cells = (
                latex_of(in_words(row.estimator) if row.estimator else "as it is"),
                f"{row.strength:.2f}" if row.estimator else "",
                "" if row.value is None else f"{100 * row.value:.1f}",
                gain,
                f"{100 * row.excess_answers:.1f}",
            )
            lines.append(f"{' & '.join(cells)} \\\\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])

    def html(self, title: str, lines: Iterable[str], rows: int) -> str:
        """Return a title, lines of text and the first rows, for the cell of a notebook."""
        shown = []
        for row in self.rows[:rows]:
            method = in_words(row.estimator) if row.estimator else "as it is"
            gain = ""
            if row.estimator and row.gain:
                gain = f"{in_points(row.gain.low)} … {in_points(row.gain.high)}"
            shown.append(
                (
                    f"{method}, gate {row.gate}" if row.gate else method,
                    f"{row.strength:.2f}" if row.estimator else "",
                    "" if row.value is None else f"{100 * row.value:.1f}",
                    gain,
                    f"{row.excess_answers:.1%}",
                )
            )
        headings = ("method", "strength", self.measure, "gain, 95%", "excess answers")
        return table(title, lines, headings, shown)


LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "α": r"$\alpha$",
    "λ": r"$\lambda$",
    "τ": r"$\tau$",
}
"""What stands in LaTeX for characters that mean something else there, or that it lacks."""


def latex_of(text: str) -> str:
    """Return a text as LaTeX shows it."""
    return "".join(LATEX.get(character, character) for character in text)


def in_words(estimator: Estimator) -> str:
    """Return an estimator in words, without what its fit has measured."""
    return describe(chosen_parameters(measures.as_plain(estimator), "agreement", "factor"))


def rows_of(
    trials: Sequence[Trial | None],
    are_by_kind: Sequence[bool],
    outcome: outcomes.Outcome,
    n_items: int,
    pairs: LabelledQueries | None,
    seed: int,
) -> list[Row]:
    """Return a row for each trial, with its gain over the first one; None for a search without biases.

    outcome: of these trials.
    """
    values: Sequence[float | None] = [None] * len(outcome.retrieved)
    gains: Sequence[measures.Interval | None] = [None] * len(values)
    if pairs is not None:
        of_queries = outcome.values
        values = np.average(of_queries, axis=1, weights=pairs.weights).tolist()
        gains = measures.bootstrap(
            of_queries - of_queries[0], pairs.weights, resamples=RESAMPLES, seed=seed
        )

    excess = outcomes.excess_answers_of(outcome, n_items).tolist()
    rows = []
    for trial, share, value, gain, by_kind in zip(
        trials, excess, values, gains, are_by_kind, strict=True
    ):
        row = Row(None, 0.0, share, value, gain, kinds=by_kind)
        if trial is not None:
            row = row._replace(
                estimator=trial.estimator,
                strength=trial.strength,
                gate=trial.gate,
            )
        rows.append(row)
    return rows
