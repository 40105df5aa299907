"""A running migration: its settings, its listeners and its signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from milvus_hubness.cli.console import is_agreed, on_signals, progress_bars, say
from milvus_hubness.cli.migrate.options import Pace, Watching
from milvus_hubness.cli.migrate.show import Timeline, printed, stream, switch_words
from milvus_hubness.jobs.common.control_file import following_control_file, postpone_cutover
from milvus_hubness.jobs.common.progress import Events, Throttle
from milvus_hubness.jobs.migration.options import MigrationOptions

if TYPE_CHECKING:
    from milvus_hubness.cli.console import Bars
    from milvus_hubness.jobs.migration.ledger import Migration


QUESTION = "the question at the terminal"
"""The reason of a pause while the user decides on the switch."""


class Terminated(SystemExit):
    """Raised on SIGTERM. The event `stopped` has this name as its reason."""


class Interrupted(SystemExit):
    """Raised on SIGINT."""


@contextmanager
def _stoppable(throttle: Throttle) -> Iterator[None]:
    """Turn SIGTERM and SIGINT within the block into exit codes of 128 plus the signal's number.

    Writers that wait for `throttle` are released, so that their threads end.
    """

    def stop(number: int) -> None:
        error = (Terminated if number == signal.SIGTERM else Interrupted)(128 + number)
        # A signal reaches the main thread alone: the others learn of it by the throttle.
        throttle.stop(error)
        raise error

    with on_signals(stop):
        try:
            yield
        except (Terminated, Interrupted):
            say("milvus-hubness: stopped; repeat the command to continue", to_stderr=True)
            raise


class Session:
    """The settings of a run, checked before any read. Raises InvalidParameter."""

    def __init__(
        self,
        watching: Watching,
        pace: Pace | None = None,
        *,
        postponed: bool = False,
        as_json: bool = False,
        question_about: str | None = None,
    ) -> None:
        """question_about: the name that moves only if the user at the terminal agrees, once the copy
        is verified; None to move it without a question."""
        self.as_json = as_json
        self._question_about = question_about
        self.timeline = Timeline()
        self._watching = watching

        # The cutover waits for this event.
        self._release = threading.Event()
        if not postponed:
            self._release.set()

        pace = pace or Pace()
        self._throttle = Throttle(pace.rows_per_second)
        self._options = MigrationOptions(
            no_writers=watching.no_writers,
            throttle=self._throttle,
            release=self._release,
        )

    @contextmanager
    def open(self) -> Iterator[MigrationOptions]:
        """Report and control a migration while this context is open. Raises UnreadableFile for a
        --control file that cannot be postponed."""
        with ExitStack() as stack:
            bars = stack.enter_context(progress_bars())
            events = Events([self.timeline, stream if self.as_json else printed(bars)])

            # Left in reverse order: the control file is let go before signals act as before.
            stack.enter_context(_stoppable(self._throttle))
            if path := self._watching.control:
                # A file of an earlier run may say "now" already.
                if not self._release.is_set():
                    postpone_cutover(path)
                stack.enter_context(
                    following_control_file(path, self._throttle, self._release, events)
                )

            yield replace(self._options, events=events, confirm=self._confirmation(bars))

    def _confirmation(self, bars: Bars) -> Callable[[Migration], bool] | None:
        """Return a function that lets the user decide on the switch; None without a question."""
        name = self._question_about
        if name is None:
            return None

        def confirm(migration: Migration) -> bool:
            # Shown to those who watch from elsewhere.
            self._throttle.pause(QUESTION)
            with bars.suspended():
                say(f"\n{switch_words(name=name, width=migration.corrected().layout.width)}.")
                is_to_switch = is_agreed(f"Switch {name} to {migration.target}?")
            self._throttle.resume(QUESTION)
            return is_to_switch

        return confirm
