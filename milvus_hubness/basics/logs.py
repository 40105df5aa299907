"""The logger of this package, whose records are one
line each, whatever stands in a key or in an error.
"""

from __future__ import annotations

import logging

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
