"""Rows rewritten beside writers: what the job undid of their writes, it does again.

A job reads rows and writes them back whole with other biases. What a client did to a row in between is undone
by that: an update is lost, a deleted row is there again. So clients note what they are about to write, while
the collection tells them to, and the job looks for a note of each row that it wrote:

    client   note            write
    job            read             write   look   [ write what the note says   look … ]

A note comes before its write. If the client's write came before the job's, the note is there when the job
looks, and is done again; if it came after, it stays. What the job does again is a write of its own, and so it
looks again, until no look shows another note.

This is for writes of HubnessClient and AsyncHubnessClient with the same rights on the journal as on the
collection; what others write is undone as before. Notes of a write that failed may be done too: a write that
failed may have been done, here as anywhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from milvus_hubness.errors import LeaseLost, NotCaughtUp, Stopped, name_some
from milvus_hubness.state import STATE_TTL, CollectionState, Journal
from milvus_hubness.stores.base import CollectionInfo, Key, Note, Store

MENDING_ROUNDS = 20


class WriteJournal:
    """What clients note of their writes to a collection while a job rewrites its rows. journal: None where no
    job does, and nothing needs to be mended."""

    def __init__(self, store: Store, collection: str, journal: Journal | None) -> None:
        self._store, self._collection, self._journal = store, collection, journal

    def mend(self, keys: Sequence[Key], partition: str | None) -> int:
        """Call this after every write of rows, with their keys. Returns how many rows had to be put right.

        Raises NotCaughtUp for rows that change faster than that can be done.
        """
        if self._journal is None or not keys:
            return 0
        return self._mend(self._journal, self._store.notes(self._journal, keys, partition=partition))

    def mend_all(self) -> int:
        """The same for every row of which there is a note."""
        return self._mend(self._journal, self._store.notes(self._journal)) if self._journal else 0

    def _mend(self, journal: Journal, notes: Sequence[Note]) -> int:
        mended: set[tuple[str | None, Key]] = set()
        for _ in range(MENDING_ROUNDS):
            if not notes:
                return len(mended)
            # Only of rows that this wrote may a write have been undone since.
            done = self._store.repeat(self._collection, journal, notes)
            mended |= {(note.partition, note.key) for note in done}
            notes = self._newer(journal, done)
        raise NotCaughtUp(
            f"rows {name_some([note.key for note in notes])} of {self._collection!r} change faster than what "
            "was undone of their changes can be done again"
        )

    def _newer(self, journal: Journal, done: Sequence[Note]) -> list[Note]:
        """Notes that have taken the place of these."""
        by_partition: dict[str | None, list[Note]] = {}
        for note in done:
            by_partition.setdefault(note.partition, []).append(note)
        newer: list[Note] = []
        for partition, before in by_partition.items():
            keys = [note.key for note in before]
            now = self._store.notes(journal, keys, partition=partition)
            newer += [note for note in now if note not in before]
        return newer


@contextmanager
def journalled(
    store: Store,
    info: CollectionInfo,
    *,
    client_ttl: float = STATE_TTL,
    stop: threading.Event | None = None,
    check: Callable[[], object] = lambda: None,
) -> Iterator[WriteJournal]:
    """Have all clients note their writes to `info` from here to the end. Rows may be read and written back
    within, if `mend` follows each write.

    Biases that are on their way must be announced before this, so that every row that is noted has them.
    client_ttl: the longest state_ttl of a client that writes, in seconds; so long is waited before the first
    row may be read. stop: once it is set, the wait ends with Stopped. check: raises LeaseLost where another
    process has taken over; asked before the collection is told anything.

    Where the work within fails or is stopped, all notes are looked at before clients are told to stop noting.
    A job that is killed leaves them noting: the next one puts right what that undid, and begins a journal of
    its own. Where another process has taken the lease, that is for it to do. Where all biases lie in side
    collections no row is rewritten, and there is no journal.
    """
    if not any(_rewrites_rows(state) for state in info.states.values()):
        _wait(client_ttl, stop)
        yield WriteJournal(store, info.name, None)
        return
    check()
    announced = store.info(info.name, counted=False)
    former = announced.journal
    if former is not None and store.exists(former.collection):
        # Its job may have been killed before all clients had heard of it.
        _wait(client_ttl, stop)
        WriteJournal(store, info.name, former).mend_all()
    check()
    journal = store.create_journal(announced)
    check()
    store.write_journal(info.name, journal)
    try:
        for left in store.journals(info.name):
            if left.collection != journal.collection:
                store.drop_journal(left)
        _wait(client_ttl, stop)
    except BaseException:
        store.end_journal(info.name, journal)
        raise
    kept = WriteJournal(store, info.name, journal)
    try:
        yield kept
    except (LeaseLost, GeneratorExit):
        raise
    except BaseException:
        kept.mend_all()
        store.end_journal(info.name, journal)
        raise
    check()
    store.end_journal(info.name, journal)


def drop_journals(store: Store, info: CollectionInfo) -> None:
    """Those that lie beside a collection whose rows no job will rewrite any more, once what a killed one
    undid is put right."""
    if info.journal is not None:
        if store.exists(info.journal.collection):
            WriteJournal(store, info.name, info.journal).mend_all()
        store.write_journal(info.name, None)
    for journal in store.journals(info.name):
        store.drop_journal(journal)


def _rewrites_rows(state: CollectionState) -> bool:
    return state.beside is None or state.beside.side is None


def _wait(seconds: float, stop: threading.Event | None) -> None:
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise Stopped("stopped while clients were told of the refresh")
