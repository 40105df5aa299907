"""`migrate status --watch`: a line about a migration, again and again."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from milvus_hubness.basics.texts import visible_line
from milvus_hubness.cli.console import INTERRUPTED, out, say, show_json
from milvus_hubness.errors import InvalidParameter, NoMigration, redacted
from milvus_hubness.jobs.migration.pauses import paused_by

if TYPE_CHECKING:
    from milvus_hubness.jobs.migration.ledger import Ledger, Migration
    from milvus_hubness.jobs.store.protocols import Store

ENDS = {"switched", "rolled back", "finished"}
"""The phases in which nothing more happens by itself."""

RATE_SECONDS = 30.0
"""The rate is that of the last so many seconds."""

LOOK_SHARE = 0.1
"""Most of the time that is spent with looks: the ledger of a large migration is long."""

Progress = Callable[["Store", "Ledger", "Migration"], dict[str, Any]]
"""Returns the facts of `migrate status`."""


def to_watch(store: Store, ledger: Ledger) -> Migration:
    """Return the migration that a process carries out, or the only one that is not over.

    Raises NoMigration, and InvalidParameter if there are several.
    """
    from milvus_hubness.jobs.common.lease import holder_of

    unfinished = [migration for migration in ledger.migrations() if migration.phase not in ENDS]
    if not unfinished:
        raise NoMigration("there is nothing to watch: no migration in this database is under way")

    running = [migration for migration in unfinished if holder_of(store, migration.target)]
    candidates = running or unfinished
    if len(candidates) > 1:
        names = ", ".join(sorted(migration.target for migration in candidates))
        raise InvalidParameter(f"several migrations are under way: name one of {names}")
    return candidates[0]


class Watch:
    """Looks at one migration until it is over."""

    seconds_between_looks = 2.0
    """Longer where a look itself takes long, see LOOK_SHARE."""

    def __init__(self, store: Store, ledger: Ledger, target: str, progress: Progress) -> None:
        self._store = store
        self._ledger = ledger
        self._target = target
        self._progress = progress

        self._looks: deque[tuple[float, int]] = deque()
        """Time and copied rows of the looks of the last RATE_SECONDS."""
        self._line_phase: str | None = None
        """The phase of the line on the terminal; None without one."""

    def run(self, *, as_json: bool) -> None:
        """Print a line for each look: in place on a terminal, else below each other.

        Raises NoMigration if the migration is dropped meanwhile, and typer.Exit on Ctrl-C.
        """
        in_place = out.is_terminal and not out.is_dumb_terminal and not as_json
        try:
            while True:
                began = time.monotonic()
                facts = self.look()
                if as_json:
                    show_json({"migration": facts})
                    sys.stdout.flush()
                elif in_place:
                    self._draw(facts)
                else:
                    say(redacted(line_of(facts)))

                if is_over(facts):
                    return
                time.sleep(max(self.seconds_between_looks, (time.monotonic() - began) / LOOK_SHARE))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        finally:
            if self._line_phase is not None:
                say("")

    def look(self) -> dict[str, Any]:
        """Return the facts of `migrate status`, with the rate of late, the lag and the pauses."""
        migration = self._ledger.find(self._target, self._target)
        facts = self._progress(self._store, self._ledger, migration)
        rows = facts["rows_copied"]
        is_copying = facts["phase"] == "copying"

        now = time.monotonic()
        self._looks.append((now, rows))
        while self._looks[0][0] < now - RATE_SECONDS:
            self._looks.popleft()
        then, rows_then = self._looks[0]

        # On the first look, that of the writes alone, of which the ledger has the seconds.
        rate = facts["rows_per_second"] if now == then else (rows - rows_then) / (now - then)
        rate = round(rate, 1) if is_copying and rate is not None else None
        pauses = paused_by(self._store, self._target)
        if rate is not None and pauses:
            rate = 0.0
        left = max(0, facts["rows"] - rows)
        return {
            **facts,
            "rows_per_second": rate,
            "eta_seconds": round(left / rate, 1) if rate else None,
            "lag_rows": self._lag(facts, left),
            "paused_by": pauses,
        }

    def _lag(self, facts: dict[str, Any], left: int) -> int | None:
        """Return how many rows the source has more than the copy, without those that are still to
        be copied; None before the copy exists, and after the switch.
        """
        source, target = facts["source"], facts["target"]
        if facts["phase"] in ENDS or facts["problem"] or not self._store.exists(target):
            return None
        if facts["phase"] not in {"copying", "catching up", "verified"}:
            return None
        return max(0, self._store.count(source) - self._store.count(target) - left)

    def _draw(self, facts: dict[str, Any]) -> None:
        # The last line of a phase stays.
        if self._line_phase not in {None, facts["phase"]}:
            sys.stdout.write("\n")
        self._line_phase = facts["phase"]
        line = visible_line(redacted(line_of(facts)))[: out.width - 1]
        sys.stdout.write(f"\r\x1b[K{line}")
        sys.stdout.flush()


def is_over(facts: dict[str, Any]) -> bool:
    """Whether nothing more happens by itself: a name has moved, or a verified copy is left."""
    phase = facts["phase"]
    return phase in ENDS or (phase == "verified" and facts["lease"] is None)


def line_of(facts: dict[str, Any]) -> str:
    """Return phase, rows, percentage, rate, lag, ETA and pauses in one line."""
    rows, total = facts["rows_copied"], facts["rows"]
    share = f" ({rows / total:.1%})" if total else ""
    parts = [f"{facts['phase']}: {rows:,}/{total:,} rows{share}"]

    rate = facts["rows_per_second"]
    eta = facts["eta_seconds"]
    lag = facts["lag_rows"]
    if facts["phase"] == "copying":
        parts.append(f"{rate or 0:,.0f} rows/s")
    if lag is not None:
        parts.append(f"lag {lag:,} rows")
    if facts["phase"] == "copying":
        parts.append("ETA unknown" if eta is None else f"ETA {eta:,.0f} s")

    if facts["problem"]:
        parts.append(f"problem: {facts['problem']}")
    elif facts["paused_by"]:
        parts.append(f"paused by {' and '.join(facts['paused_by'])}")
    elif facts["lease"] is None and not is_over(facts):
        parts.append("no process at work: repeat milvus-hubness migrate run to continue")
    elif facts["phase"] == "verified" and facts["lease"] is None:
        parts.append("waits for milvus-hubness migrate cutover")
    elif facts["switch"] and facts["switch"]["at"]:
        parts.append(f"{facts['switch']['name']} -> {facts['target']}")
    return ", ".join(parts)
