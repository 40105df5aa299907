"""The logger of this package, whose records are one
line each, whatever stands in a key or in an error, and the lines of its audit log.
"""

from __future__ import annotations

import getpass
import logging
import os
import platform
from datetime import datetime, timezone

from milvus_hubness.basics.texts import visible, visible_line


class VisibleRecords(logging.Filter):
    """A filter that lets all records through, with escapes in place of line feeds and of characters
    that a terminal obeys. A traceback keeps its lines.
    """

    _formatter = logging.Formatter()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        shown = visible_line(message)
        if shown != message:
            record.msg = shown
            record.args = None

        if record.exc_info and not record.exc_text:
            # Formatters print this text instead of their own.
            record.exc_text = visible(self._formatter.formatException(record.exc_info))

        return True


log = logging.getLogger("milvus_hubness")
log.addFilter(VisibleRecords())

AUDIT = log.getChild("audit")
"""The logger of what cannot be taken back. Its lines pass whatever the level of the package's logger, so
that a log has them without a setting of its own.
"""
# Records of a child pass the handlers of its parent, and not its filters.
AUDIT.addFilter(VisibleRecords())
AUDIT.setLevel(logging.INFO)


def audit(action: str, collection: str, **facts: object) -> None:
    """Log that something was dropped, adopted or forced: when, and by whom on which machine.

    action: "dropped", "adopted" or "forced". facts: what else is to be known of it.
    """
    who = {"user": _user(), "host": platform.node(), "process": os.getpid()}
    words = " ".join(f"{name}={fact!r}" for name, fact in {**facts, **who}.items())
    time = datetime.now(timezone.utc)
    AUDIT.info("audit: %s %s %r %s", f"{time:%Y-%m-%dT%H:%M:%SZ}", action, collection, words)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        # In a container a process may have a number that no file of users has.
        return str(os.getuid())
