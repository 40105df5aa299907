"""Fills a generation of biases beside the vectors, for `enable` and `refresh`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from milvus_hubness.basics.progress import Progress
from milvus_hubness.correction.banks.stored import Key
from milvus_hubness.correction.fitted import Correction
from milvus_hubness.errors import VerificationFailed, name_some
from milvus_hubness.jobs.beside.entries import Entries
from milvus_hubness.jobs.common.progress import key_chunks

KEYS_NAMED = 5
"""Most keys that a message names."""

MOST_PASSES = 20
"""How often all rows are read and filled, while clients write rows without a bias."""

FILLED_AT_ONCE = 2_000
"""Most rows that are read and get their entries at a time. A job that is to end does so in between."""


@dataclass
class Filled:
    """What one pass over the rows found and did."""

    rows: int = 0
    """Number of rows that were read."""
    written: int = 0
    """Number of entries that were written."""
    wrong: tuple[Key, ...] = ()
    """Keys of some of the rows whose entry was missing or had the bias of another vector."""


def fill_generation(
    entries: Entries,
    slot: int,
    correction: Correction,
    doing: str,
    progress: Progress,
    admit: Callable[[int], None] = lambda rows: None,
    *,
    keep_new: bool = False,
) -> Filled:
    """Write the entries of all rows in a slot, but those that are right already.

    So a pass over a slot that is filled checks it, and a killed one is carried on by the next. admit:
    is called with the number of rows before they are written, and may wait or raise. keep_new: whether
    the biases of rows that clients have inserted into this generation count as right, although they
    differ from the formula. Raises NotCaughtUp for rows that change faster than this.
    """
    filled = Filled()
    for partition, chunk in key_chunks(
        entries.store, entries.info, doing, progress, most=FILLED_AT_ONCE
    ):
        admit(0)
        rows = entries.read(chunk, partition)
        biases = correction.centred(rows.vectors, rows.batch)
        allowed = correction.allowed_differences(rows.vectors, biases, rows=rows.batch)
        # A row without an entry of this generation has NaN.
        is_right = np.abs(rows.biases[:, slot] - biases) <= allowed
        if keep_new:
            is_right |= rows.new & ~rows.unbiased

        wrong = rows.only(~is_right).batch.keys
        filled.rows += len(rows.batch)
        filled.wrong = (*filled.wrong, *wrong)[:KEYS_NAMED]
        if wrong:
            admit(len(wrong))
            filled.written += entries.write(wrong, partition, {slot: correction})

    return filled


def fill_all(entries: Entries, correction: Correction, progress: Progress) -> int:
    """Write biases of the generation that searches read until all are correct, as clients may write
    rows before they read the state; return the row count.

    Raises VerificationFailed for rows that change faster than this.
    """
    wrong: tuple[Key, ...] = ()
    slot = entries.state.profile.slot
    for _ in range(MOST_PASSES):
        filled = fill_generation(entries, slot, correction, "verifying", progress, keep_new=True)
        wrong = filled.wrong
        if not wrong:
            return filled.rows

        entries.wait_visible({slot: correction})

    raise VerificationFailed(
        f"rows {name_some(wrong)} of {entries.info.name!r} lack correct biases, because they "
        "change faster than enable writes biases: enable it again when clients write less"
    )


def fill_pending(
    entries: Entries,
    correction: Correction,
    waiting: int,
    progress: Progress,
    admit: Callable[[int], None] = lambda rows: None,
) -> int:
    """Write the entries of the rows that have none of the generation that searches read.

    waiting: their expected number. Returns their number. Raises NotCaughtUp for rows that change
    faster than this.
    """
    slot = entries.state.profile.slot
    doing = "computing missing biases"
    count = 0
    chunks = key_chunks(
        entries.store,
        entries.info,
        doing,
        progress,
        entries.pending,
        waiting,
        most=FILLED_AT_ONCE,
    )
    for partition, chunk in chunks:
        admit(len(chunk))
        count += entries.write(chunk, partition, {slot: correction}, are_new=True)
    return count
