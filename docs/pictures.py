"""Draw the pictures of the concepts pages into docs/pictures: `python docs/pictures.py`.

They have a ground of their own and follow the reader's light or dark mode, so their texts can be read on any page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt

from milvus_hubness import NNN, QueryBank

FOLDER = Path(__file__).parent / "pictures"
WIDTH = 460
LINE = 15
"""Distance of two lines of text."""

STYLE = """
svg { max-width: 100%; height: auto; font: 13px system-ui, sans-serif; }
text { fill: #1c2430; }
.strong { font-weight: bold; }
.ground { fill: #fff; }
.axis { stroke: #8b94a0; }
.raw { stroke: #a94c1b; }
.corrected { stroke: #12687a; }
.vector { fill: #12687a; }
.bias { fill: #a94c1b; }
.new { fill: #1f7d4d; }
.other { fill: #5d6876; }
.inside { fill: #fff; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8ebef; }
  .ground { fill: #1a2029; }
  .raw { stroke: #f0965f; }
  .corrected { stroke: #54bccf; }
}
"""
ITEMS, DIM, TOP = 400, 24, 10


def svg(height: int, title: str, parts: list[str]) -> str:
    """Return a drawing. Its rules hold for itself alone, also where a page contains it."""
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    )
    ground = f'<rect class="ground" width="{WIDTH}" height="{height}" rx="8"/>'
    title = f"<title>{escape(title)}</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", ground, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{name}>{escape(words)}</text>'


def box(x: float, y: float, width: float, kind: str, *lines: str, height: float = 36) -> list[str]:
    """Return a box with lines of text in its middle."""
    first = y + height / 2 + 5 - (len(lines) - 1) * LINE / 2
    shape = (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'
    )
    middle = x + width / 2
    texts = [
        text(middle, first + LINE * n, line, "inside", "middle") for n, line in enumerate(lines)
    ]
    return [shape, *texts]


def counts(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.intp]:
    """Return how many queries have each item among their ten best, most first."""
    best = np.argsort(-scores, axis=1)[:, :TOP]
    return np.sort(np.bincount(best.ravel(), minlength=ITEMS))[::-1]


def hubs() -> str:
    """N_10 of 400 items for 400 queries from elsewhere, before and after a correction from 400 other queries."""
    rng = np.random.default_rng(0)
    items = rng.standard_normal((ITEMS, DIM))
    asked = rng.standard_normal((2 * ITEMS, DIM)) + 0.8 * rng.standard_normal(DIM)
    items, asked = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (items, asked))
    bank, queries = np.split(asked.astype(np.float32), 2)
    raw = queries @ items.T
    bias = np.asarray(NNN(k=16, alpha=0.75).fit(QueryBank(bank)).bias(items.astype(np.float32)))

    parts = [text(14, 26, "Answers that hold each item, most first", "strong")]
    parts += [text(14, 44, "400 items, 400 queries of ten answers each")]
    for row, (kind, values) in enumerate((("raw", counts(raw)), ("corrected", counts(raw - bias)))):
        base = 170 + 125 * row
        bars = "".join(
            f"M{14 + 1.08 * i:g} {base}v-{value * 0.65:g}"
            for i, value in enumerate(values)
            if value
        )
        parts.append(f'<path class="{kind}" d="{bars}" stroke-width="1"/>')
        parts.append(f'<line class="axis" x1="14" y1="{base}" x2="446" y2="{base}"/>')

        never = int((values == 0).sum())
        parts.append(
            text(446, base - 66, f"{kind}: the first is in {values[0]} answers,", anchor="end")
        )
        parts.append(text(446, base - 66 + LINE, f"{never} items are in none", anchor="end"))
    return svg(
        310,
        "A few items take most answers in the raw ranking; the corrected ranking spreads them",
        parts,
    )


def columns(y: float, cells: Sequence[tuple[str, int, str]]) -> list[str]:
    """Return a row of labelled boxes."""
    parts: list[str] = []
    x = 66.0
    for label, width, kind in cells:
        parts += box(x, y, width - 3, kind, label)
        x += width
    return parts


def augmented() -> str:
    stored = [
        ("r, the vector", 150, "vector"),
        ("b", 40, "bias"),
        ("index hints", 134, "other"),
        ("0 … 0", 58, "other"),
    ]
    sent = [
        ("q, the query", 150, "vector"),
        ("−w", 40, "bias"),
        ("0", 134, "other"),
        ("0 … 0", 58, "other"),
    ]
    parts = [text(14, 39, "stored", "strong"), *columns(16, stored)]
    parts += [text(14, 99, "sent", "strong"), *columns(76, sent)]
    parts.append(text(66, 140, "inner product = s(q, r) − w · b(r)"))
    return svg(
        156, "The stored vector carries the bias, the query carries minus the strength", parts
    )


def slots() -> str:
    stages = [
        ("searches read the first generation", ("1: biases", "bias"), ("empty", "other"), "1"),
        ("a refresh fills the second", ("1: biases", "bias"), ("2: new biases", "new"), "1"),
        ("the state names the second", ("1: the former", "other"), ("2: biases", "bias"), "2"),
    ]
    parts: list[str] = []
    for row, (label, first, second, query) in enumerate(stages):
        y = 14 + 66 * row
        parts.append(text(14, y + 12, label, "strong"))
        for x, (name, kind) in ((14, first), (154, second)):
            parts += box(x, y + 20, 134, kind, name, height=30)
        parts.append(text(306, y + 40, f"searches read {query}"))
    return svg(
        212,
        "A refresh fills a second generation, then one change of the state lets searches read it",
        parts,
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for draw in (hubs, augmented, slots):
        (FOLDER / f"{draw.__name__}.svg").write_text(draw(), "utf-8")


if __name__ == "__main__":
    main()
