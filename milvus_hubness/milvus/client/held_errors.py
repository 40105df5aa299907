"""Error records of pymilvus that are held back while the client recovers from the errors."""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar

import grpc
from pymilvus.exceptions import MilvusException

from milvus_hubness.basics.logs import log

CHANGED = "collection %r changed while a request was on its way (%s): the request was sent again"
"""The record in place of those of pymilvus, about a collection and a reason."""

# Each thread and each task has its own block.
_records: ContextVar[list[logging.LogRecord] | None] = ContextVar("held_errors", default=None)
_pymilvus = logging.getLogger("pymilvus.decorators")


class _Hold(logging.Filter):
    """Moves error records to the innermost block of the thread or task."""

    def filter(self, record: logging.LogRecord) -> bool:
        held = _records.get()
        if held is None or record.levelno < logging.ERROR:
            return True

        held.append(record)
        return False


_HOLD = _Hold()


class HeldErrors:
    """Holds back error records of pymilvus in a block, as pymilvus logs errors before raising them.

    The block adds to `recovered` the errors that it recovers from. At its end one record of level
    INFO replaces the records of these errors; all others are logged. If the block raises, all
    records are logged, and an error of pymilvus that names `real_name` names the collection as the
    user did.
    """

    __slots__ = ("_collection", "_message", "_outer", "_records", "real_name", "recovered")

    def __init__(self, collection: str, message: str = CHANGED) -> None:
        self._collection = collection
        self._message = message
        self._records: list[logging.LogRecord] = []
        self.recovered: list[Exception] = []
        self.real_name = ""
        """The name under which the requests of the block are sent; empty for the user's own."""

    def __enter__(self) -> HeldErrors:
        # Nothing is changed for programs that only import this package. A filter is added once.
        _pymilvus.addFilter(_HOLD)
        self._outer = _records.get()
        _records.set(self._records)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        _records.set(self._outer)
        if isinstance(error, MilvusException) and self.real_name not in ("", self._collection):
            _name_as_given(error, self.real_name, self._collection)

        recovered = self.recovered if kind is None else []
        for record in self._records:
            if not any(_as_logged(error) in record.getMessage() for error in recovered):
                _pymilvus.handle(record)

        if recovered:
            last = recovered[-1]
            reason = " ".join(str(getattr(last, "message", None) or _as_logged(last)).split())
            log.info(self._message, self._collection, reason)


def _name_as_given(error: MilvusException, real_name: str, given: str) -> None:
    """Put the name that the user gave into the message of an error, in place of the real name."""
    whole_name = rf"(?<![\w.]){re.escape(real_name)}(?!\w)"
    error._message = re.sub(whole_name, lambda _: given, error._message)


def _as_logged(error: Exception) -> str:
    """Return the part of pymilvus's record of an error that is about this error alone."""
    return str(error.details() if isinstance(error, grpc.RpcError) else error)
