"""Error records of pymilvus that are held back while a call may recover from the errors."""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar
from typing import NamedTuple

import grpc
from pymilvus.exceptions import MilvusException

CHANGED = "collection %r changed while a request was on its way (%s): the request was sent again"
"""The record in place of those of pymilvus, about a collection and a reason."""

_pymilvus = logging.getLogger("pymilvus.decorators")


class _Recovered(NamedTuple):
    """An error that a call recovered from."""

    error: Exception
    message: str
    """The record in its place, about the collection and the reason."""
    collection: str

    def log(self) -> None:
        # Imported late: a client that recovers from nothing needs no log.
        from milvus_hubness.basics.logs import log

        error = self.error
        reason = " ".join(str(getattr(error, "message", None) or _as_logged(error)).split())
        log.info(self.message, self.collection, reason)


class HeldErrors:
    """Holds back error records of pymilvus during a call, as pymilvus logs errors before raising them.

    At its end one record of level INFO replaces the records of the errors that the call recovered
    from, see `recovered_from`; all others are logged. If the call raises, all records are logged.
    """

    __slots__ = ("_outer", "records", "recovered")

    def __enter__(self) -> None:
        self._outer = _held.get()
        self.records: list[logging.LogRecord] = []
        """The records held back so far."""
        self.recovered: list[_Recovered] = []
        """The errors that the call recovered from so far."""
        _held.set(self)

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        _held.set(self._outer)
        if self.records or self.recovered:
            self._release(self.recovered if kind is None else [])

    def _release(self, recovered: list[_Recovered]) -> None:
        known = [_as_logged(each.error) for each in recovered]
        for record in self.records:
            if not any(text in record.getMessage() for text in known):
                _pymilvus.handle(record)

        last_by_message = {each.message: each for each in recovered}
        for each in last_by_message.values():
            each.log()


# Each thread and each task has its own call.
_held: ContextVar[HeldErrors | None] = ContextVar("held_errors", default=None)


class _Hold(logging.Filter):
    """Moves error records to the call of the thread or task."""

    def filter(self, record: logging.LogRecord) -> bool:
        held = _held.get()
        if held is None or record.levelno < logging.ERROR:
            return True

        held.records.append(record)
        return False


_HOLD = _Hold()


def watch_pymilvus() -> None:
    """Let `HeldErrors` see the records of pymilvus.

    Clients call it: nothing changes for programs that only import this package.
    """
    # A filter is added once.
    _pymilvus.addFilter(_HOLD)


def recovered_from(error: Exception, collection: str, message: str = CHANGED) -> None:
    """Note that the call recovered from an error, whose record is replaced by this message.

    The proxy, where pymilvus logs nothing, has no such call: the message is logged at once.
    """
    recovered = _Recovered(error, message, collection)
    held = _held.get()
    if held is None:
        recovered.log()
    else:
        held.recovered.append(recovered)


def name_as_given(error: Exception, real_name: str, given: str) -> None:
    """Put the name that the user gave into the message of an error of pymilvus, in place of the name
    that the request was sent under; that is empty for the user's own.
    """
    if isinstance(error, MilvusException) and real_name not in ("", given):
        whole_name = rf"(?<![\w.]){re.escape(real_name)}(?!\w)"
        error._message = re.sub(whole_name, lambda _: given, error._message)


def _as_logged(error: Exception) -> str:
    """Return the part of pymilvus's record of an error that is about this error alone."""
    return str(error.details() if isinstance(error, grpc.RpcError) else error)
