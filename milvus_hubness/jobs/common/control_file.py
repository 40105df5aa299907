"""The control file of a running migration, in JSON, for example
{"paused": false, "rows_per_second": 500, "chunk_seconds": 1.5, "cutover": "now"}.
"""

from __future__ import annotations

import json
import reprlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from milvus_hubness.basics.files.opening import MissingFile, read_bytes
from milvus_hubness.basics.files.writing import whole_file
from milvus_hubness.errors import InvalidParameter, UnreadableFile
from milvus_hubness.jobs.common.progress import (
    LIMITS,
    Events,
    Throttle,
    checked_limit,
    polling,
)

CUTOVER = ("postponed", "now")
"""The values of the setting `cutover`."""

SETTINGS = ("paused", *LIMITS, "cutover")
"""The names of all settings."""

CONTROL_FILE = "the control file"
"""The reason of a pause by the control file."""


@contextmanager
def following_control_file(
    path: Path,
    throttle: Throttle,
    release: threading.Event,
    events: Events,
    *,
    poll_seconds: float = 0.5,
) -> Iterator[None]:
    """Apply the settings in a JSON file now, and again whenever its content changes while this
    context is open. Settings that it leaves out stay as they are. A missing file changes nothing;
    an invalid one neither, and `events` gets one warning. release: set while the cutover may take
    place.
    """
    applied: bytes | None = None
    problem: str | None = None
    is_reported = False

    def look() -> None:
        nonlocal applied, problem, is_reported
        try:
            content = _content(path)
            settings = _parsed(path, content) if content is not None else {}
        except UnreadableFile as error:
            # A file is invalid for a moment while it is written: a problem counts at the second look.
            if str(error) != problem:
                problem = str(error)
                is_reported = False
            elif not is_reported:
                is_reported = True
                message = f"{problem}; nothing changes until the file is corrected"
                events.report("warning", message=message)
            return

        problem = None
        if content is not None and content != applied:
            applied = content
            _apply(settings, throttle, release, events)

    def poll() -> None:
        try:
            look()
        except Exception as error:
            # A listener has failed: a paused run would wait for this thread for ever.
            throttle.stop(error)

    look()
    with polling(poll, poll_seconds, "milvus-hubness-control-file"):
        yield


def _apply(
    settings: Mapping[str, Any], throttle: Throttle, release: threading.Event, events: Events
) -> None:
    """Change what the settings name, and report what is different then."""
    former_limits = _limits(throttle)
    throttle.set_rate(**{name: settings[name] for name in LIMITS if name in settings})
    limits = _limits(throttle)
    if limits != former_limits:
        events.report("rate", **limits)

    cutover = settings.get("cutover")
    if cutover == "postponed":
        release.clear()
    elif cutover == "now":
        release.set()

    paused = settings.get("paused")
    if paused is True and throttle.pause(CONTROL_FILE):
        events.report("paused", reason=CONTROL_FILE)
    elif paused is False and throttle.resume(CONTROL_FILE):
        events.report("resumed", reason=CONTROL_FILE)


def _limits(throttle: Throttle) -> dict[str, float | None]:
    snapshot = throttle.snapshot()
    return {name: snapshot[name] for name in LIMITS}


def postpone_cutover(path: Path) -> None:
    """Take back a release of the cutover that the control file has from an earlier run.

    Raises UnreadableFile.
    """
    content = _content(path)
    settings = _parsed(path, content) if content is not None else {}
    if settings.get("cutover") == "now":
        # Another process may read the file at any moment, and must not see half of it.
        with whole_file(path) as file:
            json.dump({**settings, "cutover": "postponed"}, file)


def _content(path: Path) -> bytes | None:
    try:
        return read_bytes(path)
    except MissingFile:
        return None


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    """Return the settings. Raises UnreadableFile unless all of them can be applied."""
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"{path}: is not JSON: {error}") from None

    if not isinstance(settings, dict):
        raise UnreadableFile(f'{path}: is not a JSON object such as {{"paused": true}}')

    try:
        check_settings(settings)
    except InvalidParameter as error:
        raise UnreadableFile(f"{path}: {error}") from None

    return settings


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise InvalidParameter unless all of `settings` can be applied."""
    for name, value in settings.items():
        if name in LIMITS:
            checked_limit(name, value)
        elif name == "paused":
            if not isinstance(value, bool):
                raise InvalidParameter(f"paused must be true or false, not {reprlib.repr(value)}")
        elif name == "cutover":
            if value not in CUTOVER:
                raise InvalidParameter(
                    f"cutover must be one of {', '.join(CUTOVER)}, not {reprlib.repr(value)}"
                )
        else:
            raise InvalidParameter(f"{reprlib.repr(name)} is not one of {', '.join(SETTINGS)}")
