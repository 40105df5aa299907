"""Draw the pictures of the concepts pages into docs/pictures: `python docs/pictures.py`."""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt

from milvus_hubness import NNN, QueryBank

FOLDER = Path(__file__).parent / "pictures"
STYLE = "text{font:13px sans-serif;fill:#555}.strong{font-weight:bold}"
BLUE, RED, GREY, GREEN = "#4c78a8", "#e45756", "#bab0ac", "#54a24b"
ITEMS, DIM, TOP = 400, 24, 10


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    size = f'viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, **attributes: str) -> str:
    extra = "".join(f' {name.rstrip("_").replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}"{extra}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" rx="2"/>'


def counts(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.intp]:
    """Return how many queries have each item among their ten best, most first."""
    best = np.argsort(-scores, axis=1)[:, :TOP]
    return np.sort(np.bincount(best.ravel(), minlength=ITEMS))[::-1]


def hubs() -> str:
    """N_10 of 400 items for 400 queries from elsewhere, before and after a correction from 400 other queries."""
    rng = np.random.default_rng(0)
    items, asked = (
        rng.standard_normal((ITEMS, DIM)),
        rng.standard_normal((2 * ITEMS, DIM)) + 0.8 * rng.standard_normal(DIM),
    )
    items, asked = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (items, asked))
    bank, queries = np.split(asked.astype(np.float32), 2)
    raw = queries @ items.T
    bias = np.asarray(NNN(k=16, alpha=0.75).fit(QueryBank(bank)).bias(items.astype(np.float32)))
    parts = [text(10, 18, "Answers that hold each item, of 400 items and 400 queries, most first", class_="strong")]
    for row, (label, values, colour) in enumerate((("raw", counts(raw), RED), ("corrected", counts(raw - bias), BLUE))):
        base = 150 + 125 * row
        bars = "".join(f"M{10 + 1.4 * i:g} {base}v-{value * 0.65:g}" for i, value in enumerate(values) if value)
        parts.append(f'<path d="{bars}" stroke="{colour}" stroke-width="1.2"/>')
        never = int((values == 0).sum())
        parts.append(text(200, base - 60, f"{label}: the first is in {values[0]} answers, {never} items are in none"))
        parts.append(f'<line x1="10" y1="{base}" x2="570" y2="{base}" stroke="{GREY}"/>')
    return svg(580, 290, "A few items take most answers in the raw ranking; the corrected ranking spreads them", parts)


def columns(y: float, cells: list[tuple[str, int, str]]) -> list[str]:
    """A row of labelled boxes."""
    parts, x = [], 120.0
    for label, width, colour in cells:
        parts += [
            box(x, y, width - 3, 34, colour),
            text(x + width / 2, y + 21, label, text_anchor="middle", fill="#fff", style="fill:#fff"),
        ]
        x += width
    return parts


def augmented() -> str:
    stored = [
        ("r, the vector", 200, BLUE),
        ("b", 45, RED),
        ("b", 45, RED),
        ("index hints", 100, GREY),
        ("0 … 0", 60, GREY),
    ]
    sent = [("q, the query", 200, BLUE), ("−w", 45, RED), ("0", 45, GREY), ("0", 100, GREY), ("0 … 0", 60, GREY)]
    parts = [
        text(10, 42, "stored", class_="strong"),
        *columns(20, stored),
        text(10, 102, "sent", class_="strong"),
        *columns(80, sent),
    ]
    parts.append(text(120, 140, "inner product = s(q, r) − w · b(r)"))
    return svg(580, 155, "The stored vector carries the bias, the query carries minus the strength", parts)


def slots() -> str:
    stages = [
        ("searches read slot 0", ("b, active", RED), ("empty", GREY), "−w, 0"),
        ("a refresh writes slot 1", ("b, active", RED), ("new b, standby", GREEN), "−w, 0"),
        ("the state names slot 1", ("old b, standby", GREY), ("new b, active", RED), "0, −w"),
    ]
    parts = []
    for row, (label, first, second, query) in enumerate(stages):
        y = 20 + 55 * row
        parts += [text(10, y + 21, label), box(180, y, 130, 34, first[1]), box(315, y, 130, 34, second[1])]
        for x, (name, _) in ((245, first), (380, second)):
            parts.append(text(x, y + 21, name, text_anchor="middle", style="fill:#fff"))
        parts.append(text(460, y + 21, f"query: {query}"))
    return svg(
        580, 185, "A refresh fills the standby slot, then one change of the state makes it the active one", parts
    )


def writes() -> str:
    steps = ["record the batch", "read rows", "write rows by the alias", "replay write intents", "drop the record"]
    parts = [text(10, 20, "job", class_="strong"), text(10, 120, "client", class_="strong")]
    for number, step in enumerate(steps):
        x = 10 + 114 * number
        parts += [
            box(x, 32, 108, 40, BLUE),
            text(x + 54, 56, step, text_anchor="middle", style="fill:#fff;font-size:10px"),
        ]
    for number, step in enumerate(["note the write", "write the row", "confirm the note"]):
        x = 124 + 114 * number
        parts += [
            box(x, 102, 108, 40, GREEN),
            text(x + 54, 126, step, text_anchor="middle", style="fill:#fff;font-size:10px"),
        ]
    return svg(
        580, 155, "A client notes a write before it makes it; the job replays what its own write has undone", parts
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for draw in (hubs, augmented, slots, writes):
        (FOLDER / f"{draw.__name__}.svg").write_text(draw(), "utf-8")


if __name__ == "__main__":
    main()
