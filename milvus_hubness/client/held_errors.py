"""Error records of pymilvus, held back until it is known whether the client recovers from the error.

pymilvus logs an error with its traceback before it raises it. If a collection was switched to another form
just before, the client sends the request again in that form: the record tells of a failure that is none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_records: ContextVar[list[logging.LogRecord] | None] = ContextVar("held_errors", default=None)
_pymilvus, _log = logging.getLogger("pymilvus.decorators"), logging.getLogger("milvus_hubness")


class _Hold(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        held = _records.get()
        if held is None or record.levelno < logging.ERROR:
            return True
        held.append(record)
        return False


_pymilvus.addFilter(_Hold())


@contextmanager
def held_errors(collection: str) -> Iterator[list[Exception]]:
    """Hold the records back within the block, and yield a list for the errors that it recovers from.

    At its end one record of level INFO stands for those of these errors; all others are logged. If the block
    raises, all are.
    """
    outer, held, recovered = _records.get(), list[logging.LogRecord](), list[Exception]()
    _records.set(held)
    try:
        yield recovered
    except BaseException:
        recovered.clear()
        raise
    finally:
        _records.set(outer)
        for record in held:
            if not any(str(error) in record.getMessage() for error in recovered):
                _pymilvus.handle(record)
        if recovered:
            reason = " ".join(str(getattr(recovered[-1], "message", recovered[-1])).split())
            _log.info(
                "collection %r changed while a request was on its way (%s): the request was sent again",
                collection,
                reason,
            )
