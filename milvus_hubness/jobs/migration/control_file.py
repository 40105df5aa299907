"""A file that steers a running migration.

{"paused": false, "rows_per_second": 500, "bytes_per_second": null, "chunk_seconds": 1.5, "cutover": "now"}
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from milvus_hubness.errors import InvalidParameter, UnreadableFile
from milvus_hubness.jobs.migration.control import Controls, check_settings
from milvus_hubness.jobs.migration.events import Events

POLL_SECONDS = 0.5


class ControlFile:
    """Applies the settings in a JSON file, and what is changed in it later, while this is open.

    What stands in the file already holds from the first line of the `with` body on. When the file changes,
    those settings are applied whose value is another than before, so that what was asked in other ways
    meanwhile stays. A file that is not there, or not there any more, changes nothing; of one that is broken
    there is one warning to `events`, and what held before holds on.
    """

    def __init__(self, path: Path, controls: Controls, events: Events) -> None:
        self._path, self._controls, self._events = path, controls, events
        self._content: bytes | None = None
        self._settings: dict[str, Any] = {}
        self._problem: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="milvus-hubness-control-file", daemon=True)

    def __enter__(self) -> ControlFile:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            self._look()

    def _look(self) -> None:
        try:
            content = _content(self._path)
            if content is None or content == self._content:
                return
            settings = _parsed(self._path, content)
            changed = {
                name: value for name, value in settings.items() if value != self._settings.get(name, ...)
            }
            self._controls.apply(changed)
        except (InvalidParameter, UnreadableFile) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                self._events.report("warning", message=f"the control file is not followed: {error}")
        else:
            self._content, self._settings, self._problem = content, settings, None


def write_control(path: Path, **changes: Any) -> dict[str, Any]:
    """Change these settings in the control file at `path`, in one step for those who read it, and keep its
    others; it is made if it is not there. What it holds then. Raises InvalidParameter, and UnreadableFile
    where the file is broken or cannot be written."""
    content = _content(path)
    settings = {**(_parsed(path, content) if content is not None else {}), **changes}
    check_settings(settings)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(settings))
        os.replace(temporary, path)
    except OSError as error:
        raise UnreadableFile(f"cannot write the control file {path}: {error.strerror}") from None
    return settings


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableFile(f"cannot read {path}: {error.strerror}") from None


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    try:
        settings = json.loads(content)
    except ValueError as error:
        raise UnreadableFile(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise UnreadableFile(f"{path} does not hold a JSON object")
    check_settings(settings)
    return settings
