"""A headless Chromium that opens many pages in one start, and what a person would notice on them."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on the PATH: apt-get install chromium"
)
WIDTHS = (390, 900, 1280)
"""A telephone, a half window, and a screen."""
MODES = ("light", "dark")
ANSWER_SECONDS = 30

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip

FIRST_FREE = 10
"""Chromium reads commands from descriptor 3 and answers on 4: ours must be neither."""

NOTICE = Path(__file__).with_name("notice.js").read_text("utf-8")


class Browser:
    """Chromium with one tab, controlled over its debugging pipe: it needs no port and no library."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        (commands, self._commands), (self._answers, answers) = _pipe(), _pipe()
        start = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", start, CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)

        self._session: str | None = None
        self._count = 0
        self._received = b""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._call("Page.enable")

    def close(self) -> None:
        self._session = None
        try:
            self._call("Browser.close")
            self._process.wait(10)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def show(self, width: int, mode: str) -> None:
        """Give the window another width, and the reader the light or the dark mode."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": mode}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        """Open a page and wait until it and its images are loaded."""
        opened = self._call("Page.navigate", url=url)
        assert "errorText" not in opened, f"{url}: {opened['errorText']}"
        self._receive(lambda message: message.get("method") == "Page.loadEventFired")

    def open_anew(self, url: str, mode: str) -> None:
        """Open a page as at a first visit, and wait until its script has chosen its colours.

        The page may note its choice when it is left, so that it is forgotten when the page begins to load.
        """
        forget = self._call("Page.addScriptToEvaluateOnNewDocument", source="localStorage.clear()")
        self.open(url)
        self._call("Page.removeScriptToEvaluateOnNewDocument", **forget)

        deadline = time.monotonic() + ANSWER_SECONDS
        while self.notice()["isDark"] != (mode == "dark"):
            assert time.monotonic() < deadline, f"{url} does not follow the {mode} mode"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        found = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def notice(self, settings: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the number of texts, and what a person would notice: see notice.js."""
        return self.evaluate(f"({NOTICE})({json.dumps(settings or {})})")

    def screenshot(self) -> bytes:
        """Return the whole page as a PNG image."""
        taken = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")

        answer = self._receive(lambda received: received.get("id") == number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _receive(self, wanted: Any) -> dict[str, Any]:
        """Return the next wanted message; others are passed over."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            message, separator, rest = self._received.partition(b"\0")
            if separator:
                self._received = rest
                received = json.loads(message)
                if wanted(received):
                    return received
                continue

            left = deadline - time.monotonic()
            assert select.select([self._answers], [], [], max(left, 0))[0], "Chromium is silent"
            read = os.read(self._answers, 1 << 20)
            assert read, "Chromium ended"
            self._received += read


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe, reading and writing, with numbers from FIRST_FREE on."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
