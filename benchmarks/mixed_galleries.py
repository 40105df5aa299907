"""Galleries of several kinds of items, made from the sets of `benchmarks.data`. Computes nothing else.

MIXED: half of the items are of the queries' kind, and the right item is of either. caption_document has the
shape of MixBench (arXiv 2507.19054): an item is one of its English captions or its German document, and its
other four captions ask for it; five draws. The other tasks have no second form of the queries' kind. There it
is simulated: the query and a multiple of the difference of two bank queries, such that the raw search in a
gallery of this kind alone finds it as often as the right item in a gallery of the other kind alone ("as hard")
or for 90% of the queries ("easy"). Two draws.

REAL: nothing is simulated. Photos and titles of clip_products, English captions and German documents, code and
docstrings: all forms of all items in one gallery. A query never finds itself: its own row is no answer. No set
here has photos or titles of one item twice, so that the right row is of the other kind, among as many rows of the
queries' own kind; captions alone have right rows of both kinds. The set that has is MixBench: `benchmarks.mixbench`.

UNTIDY: one kind with ten times the rows of the other, three kinds, and rows of a kind that arrives after the
migration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.reference import unit
from milvus_hubness.quality.outcomes import assess
from milvus_hubness.quality.right_items import RightItems
from tests.support.real_data import EMBEDDING_TASKS, Task, load_task

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
Names = npt.NDArray[np.str_]
BANK = 9000
"""Most bank queries."""
EASY = 0.9
OWN, OTHER = "own", "other"
"""Kinds of items where only the queries' own kind matters."""


class Mixed(NamedTuple):
    """A gallery of several kinds, and what asks for its items."""

    query: Floats
    """(n_queries, d)."""
    gallery: Floats
    """(n_items, d)."""
    bank: Floats
    """(m, d), queries of other items."""
    kinds: Names
    """(n_items,) the kind of each item."""
    query_kinds: Names
    """(n_queries,) the kind of each query."""
    positives: Sequence[Numbers]
    """The right items of each query."""
    things: Numbers
    """(n_queries,) the number of what each query looks for, from 0, the same in all draws: it is what an
    interval draws."""
    itself: Numbers
    """(n_queries,) the item that is the query itself, which is no answer; -1 for none."""
    is_late: npt.NDArray[np.bool_]
    """(n_items,) whether an item is inserted after the migration."""

    @classmethod
    def of(
        cls,
        query: Floats,
        gallery: Floats,
        bank: Floats,
        kinds: Names,
        positives: npt.ArrayLike,
        things: npt.ArrayLike,
        *,
        query_kinds: Names | str = OWN,
        itself: npt.ArrayLike = -1,
        is_late: npt.ArrayLike = False,
    ) -> Mixed:
        """Return a gallery. positives: (n_queries,), or (n_queries, p), or rows of unlike lengths."""
        rights = [np.atleast_1d(np.asarray(right, np.int64)) for right in positives]  # type: ignore[union-attr]
        return cls(
            query,
            gallery,
            bank,
            kinds,
            np.broadcast_to(query_kinds, len(query)),
            rights,
            np.asarray(things, np.int64),
            np.broadcast_to(np.asarray(itself, np.int64), len(query)),
            np.broadcast_to(np.asarray(is_late, bool), len(gallery)),
        )


def simulated(task: Task, wanted: float | None) -> Floats:
    """Return (n_items, d) second forms of the queries, of their lengths. wanted: their R@1 in the raw search;
    None for that of the items."""
    rng = np.random.default_rng(1)
    first, second = (
        task.bank[rng.integers(len(task.bank), size=len(task.query))] for _ in range(2)
    )
    lengths = np.linalg.norm(task.query, axis=1, keepdims=True)

    def moved(share: float) -> Floats:
        return unit(task.query + np.float32(share) * (first - second)) * lengths

    def recall(items: Floats) -> float:
        zeros = np.zeros(len(items), np.float32)
        return float(
            assess(task.query, items, [zeros], RightItems.of(task.positives)).values.mean()
        )

    wanted = wanted or recall(task.gallery)
    low, high = 0.0, 8.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if recall(moved(middle)) > wanted else (low, middle)
    return moved(low)


def halves(name: str, form: str) -> Iterator[Mixed]:
    """Yield the galleries of MIXED; each item is of either kind in some. form: empty for real second forms."""
    task = load_task(name)
    n_items = len(task.gallery)
    order = np.random.default_rng(0).permutation(n_items)
    captions = task.query.reshape(-1, n_items, task.query.shape[1])
    assert (task.positives.reshape(-1, n_items) == np.arange(n_items)).all()

    second = simulated(task, EASY if form == "easy" else None)[None] if form else captions
    for number in range(max(2, len(captions))):
        own = (order < n_items // 2) ^ bool(number % 2)
        others = captions if form else np.delete(captions, number, axis=0)
        items = np.tile(np.arange(n_items), len(others))
        yield Mixed.of(
            others.reshape(-1, task.gallery.shape[1]),
            np.where(own[:, None], second[number % len(second)], task.gallery),
            task.bank[:BANK],
            np.where(own, OWN, OTHER),
            items,
            items,
        )


def photos_and_titles(*asking: str) -> Iterator[Mixed]:
    """Yield all photos and titles of clip_products; titles, photos or both ask, and a bank of the same kinds."""
    titles = load_task("clip_products t2i")
    n_items = len(titles.gallery)
    forms = {"title": (titles.query, titles.bank), "photo": (titles.gallery, titles.target_bank)}
    first_row = {"title": 0, "photo": n_items}
    items = np.arange(n_items)

    own_rows = np.concatenate([first_row[kind] + items for kind in asking])
    yield Mixed.of(
        np.concatenate([forms[kind][0] for kind in asking]),
        np.concatenate([titles.query, titles.gallery]),
        np.concatenate([forms[kind][1] for kind in asking]),
        np.repeat(["title", "photo"], n_items),
        (own_rows + n_items) % (2 * n_items),
        np.tile(items, len(asking)),
        query_kinds=np.repeat(asking, n_items),
        itself=own_rows,
    )


def two_languages() -> Iterator[Mixed]:
    """Yield an English caption and the German document of each item of caption_document: two right rows."""
    task = load_task("caption_document")
    n_items = len(task.gallery)
    captions = task.query.reshape(-1, n_items, task.query.shape[1])
    items = np.tile(np.arange(n_items), len(captions) - 1)
    yield Mixed.of(
        captions[1:].reshape(-1, task.gallery.shape[1]),
        np.concatenate([captions[0], task.gallery]),
        task.bank[:BANK],
        np.repeat(["English", "German"], n_items),
        np.stack([items, items + n_items], axis=1),
        items,
        query_kinds="English",
    )


def code_and_text() -> Iterator[Mixed]:
    """Yield function bodies and docstrings of docstring_code; docstrings look for the body."""
    task = load_task("docstring_code")
    n_items = len(task.gallery)
    items = np.arange(n_items)
    yield Mixed.of(
        task.query,
        np.concatenate([task.query, task.gallery]),
        task.bank[:BANK],
        np.repeat(["docstring", "body"], n_items),
        items + n_items,
        items,
        query_kinds="docstring",
        itself=items,
    )


def unbalanced(name: str, form: str) -> Iterator[Mixed]:
    """Yield galleries in which one kind has ten times the rows of the other, either of the two in turn."""
    task = load_task(name)
    n_items = len(task.gallery)
    items = np.arange(n_items)
    second = simulated(task, EASY if form == "easy" else None)
    order = np.random.default_rng(0).permutation(n_items)
    is_rare = order % 11 == 0
    for own in (~is_rare, is_rare):
        yield Mixed.of(
            task.query,
            np.where(own[:, None], second, task.gallery),
            task.bank[:BANK],
            np.where(own, OWN, OTHER),
            items,
            items,
        )


def three_kinds(name: str, form: str, *, late: bool = False) -> Iterator[Mixed]:
    """Yield galleries of thirds: text, an image, and both as one vector, as MixBench has them.

    late: the rows with both arrive after the migration.
    """
    task = load_task(name)
    n_items = len(task.gallery)
    items = np.arange(n_items)
    second = simulated(task, EASY if form == "easy" else None)
    both = unit(unit(second) + unit(task.gallery)) * np.linalg.norm(second, axis=1, keepdims=True)
    order = np.random.default_rng(0).permutation(n_items)
    for number in range(3):
        third = (order + number) % 3
        yield Mixed.of(
            task.query,
            np.choose(third[:, None], [second, task.gallery, both]),
            task.bank[:BANK],
            np.array([OWN, OTHER, "both"])[third],
            items,
            items,
            is_late=(third == 2) & late,
        )


Draws = Callable[[], Iterator[Mixed]]

MIXED: dict[str, Draws] = {"caption_document": partial(halves, "caption_document", "")} | {
    f"{name}, {form}": partial(halves, name, form)
    for name in EMBEDDING_TASKS
    if name not in ("docstring_code", "caption_document")
    for form in ("as hard", "easy")
}
REAL: dict[str, Draws] = {
    "photos and titles, by titles": partial(photos_and_titles, "title"),
    "photos and titles, by photos": partial(photos_and_titles, "photo"),
    "photos and titles, by both": partial(photos_and_titles, "title", "photo"),
    "captions of two languages": two_languages,
    "code and docstrings": code_and_text,
}
UNTIDY: dict[str, Draws] = {
    "text_video_msrvtt t2v, 10:1": partial(unbalanced, "text_video_msrvtt t2v", "as hard"),
    "clip_products t2i, 10:1": partial(unbalanced, "clip_products t2i", "as hard"),
    "text_video_msrvtt t2v, three kinds": partial(three_kinds, "text_video_msrvtt t2v", "as hard"),
    "clip_products t2i, three kinds": partial(three_kinds, "clip_products t2i", "as hard"),
    "clip_products t2i, a third kind later": partial(
        three_kinds, "clip_products t2i", "as hard", late=True
    ),
}
GALLERIES = MIXED | REAL | UNTIDY
