"""Output of plans, migrations and their events, as text, progress bars or JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from shlex import quote
from typing import TYPE_CHECKING, Any

from milvus_hubness.cli.console import (
    UNNAMED,
    bank_words,
    kind_words,
    say,
    show_facts,
    show_json,
    show_result,
)
from milvus_hubness.errors import name_some

if TYPE_CHECKING:
    from milvus_hubness.basics.progress import Progress
    from milvus_hubness.jobs.common.progress import Event, Listener
    from milvus_hubness.jobs.migration.ledger import Migration
    from milvus_hubness.jobs.store.protocols import Store
    from milvus_hubness.jobs.store.records import CollectionInfo

RESOLUTION = (
    "{in_order:.1%} of {queries} queries keep the order of their nearest rows at strength 0"
)


def show_plan(plan: dict[str, Any]) -> None:
    """Print the facts of a plan."""
    sizes = {name: f"{size / 2**20:,.1f} MiB" for name, size in plan["vector_bytes"].items()}
    memory = {name: f"{size / 2**20:,.1f} MiB" for name, size in plan["memory_bytes"].items()}
    params = ", ".join(f"{name} {value}" for name, value in plan["index_params"].items())
    index = f"{plan['index_type']} {params}".rstrip()
    resolution = plan["resolution"]

    about = f"{plan['estimated_seconds']} s (from a sample, read only)"
    if plan["waiting_seconds"]:
        about += f", {plan['waiting_seconds']} s of it for clients to hear of it"

    of_vectors = f"({sizes['source']} -> {sizes['target']} of vectors)"
    rows = f"{plan['rows']:,}"
    if plan["vectors_per_row"] > 1:
        rows += f", of {plan['vectors_per_row']:g} vectors each on average"
    facts = {
        "would create": plan["target"],
        "vector field": f"{plan['field'] or UNNAMED}, {plan['dtype']}, {index}",
        "metric": f"{plan['metric']}, served as IP",
        "rows": rows,
        "width": f"{plan['dim']} -> {plan['width']} {of_vectors}",
        "partitions": ", ".join(plan["partitions"]),
        "fields added": ", ".join(plan["hidden_fields"]),
        **bank_words(plan),
        "kinds": kind_words(plan["kinds"]),
        "alias": plan["alias"],
        "rename": f"{plan['source']} becomes an alias of the copy" if plan["rename"] else None,
        "server": plan["server"],
        "memory": "{source} now, {target} for the copy, {both} for both".format(**memory),
        "recall": plan["recall"] and plan["recall"]["said"],
        "resolution": resolution and RESOLUTION.format(**resolution),
        "about": about,
        "note": "\n".join(plan["remarks"]),
    }
    show_facts(f"Migration of {plan['source']}", facts)


NO_ALIAS = "ALIAS"
"""What stands in a command for an alias that the user has to choose."""

ALIAS_WORDS = (
    f"{NO_ALIAS} is the name by which the application searches: it is created if it is new, and moves "
    "to the copy"
)


def alias_to_move(info: CollectionInfo, named: str) -> str:
    """Return the alias for a command that switches; NO_ALIAS if the user has to choose it.

    info: of the source. named: the name that the user typed for it.
    """
    if named in info.aliases:
        return named
    # Which of several the application reads, only the user knows.
    return info.aliases[0] if len(info.aliases) == 1 else NO_ALIAS


BEFORE_SWITCH = (
    "{name} will lead to vectors of {width} numbers, so that plain clients fail when they search or "
    "write it. Have applications use HubnessClient, with the same calls, or milvus-hubness proxy "
    "(on Qdrant HubnessQdrantClient): they serve the source as well, so change over now"
)
"""Which clients fail after the switch, and the remedy."""


def switch_words(*, name: str | None, width: int) -> str:
    """Return which clients fail after the switch, and what to do before it.

    name: what applications read, None if it is not chosen yet. width: of the copy's vectors.
    """
    return BEFORE_SWITCH.format(name=name or "the application's name", width=width)


def show_before_switch(plan: dict[str, Any]) -> None:
    """Print what applications need before the switch of a plan."""
    name = plan["source"] if plan["rename"] else plan["alias"]
    show_facts("\nBefore the switch", {"clients": switch_words(name=name, width=plan["width"])})


def migration_facts(store: Store, migration: Migration) -> dict[str, Any]:
    """Return a migration as plain data, without facts that only the program needs."""
    facts = migration.model_dump(
        mode="json", exclude={"version", "arguments", "state", "announced_at"}
    )
    # A refresh by a copy moves the name on, and the ledger has one migration for each move.
    name = migration.alias
    return {
        **facts,
        "leads_to": store.alias_target(name) if name else None,
        "stayed": _stayed(store, migration),
    }


def _stayed(store: Store, migration: Migration) -> list[str]:
    """Return the aliases that lead to the source after a switch; none before it."""
    source = migration.source_now
    # Who cleans drops the source, which then has none.
    if migration.phase != "switched" or not store.exists(source):
        return []
    return list(store.info(source, counted=False, checked=False).aliases)


def show_migration(migration: Migration, facts: dict[str, Any]) -> None:
    """Print the state of a migration after a command. facts: those of `migration_facts`."""
    show_facts(
        f"\n{migration.source} -> {migration.target}: {migration.phase}",
        migration_words(migration, facts),
    )


STAYED = (
    "{names} still lead{s} to {source}: applications that read {that} have no correction. To move "
    "{first} instead: migrate rollback {undo}, then migrate run {run} --alias {first}"
)


def migration_words(migration: Migration, facts: dict[str, Any]) -> dict[str, object]:
    """Return the results of a migration in words. facts: those of `migration_facts`."""
    count = migration.invalid
    keys = list(migration.invalid_keys)
    return {
        "bank": migration.bank_collection,
        "passes": f"{migration.passes} to catch up" if migration.passes else None,
        "verified": verification_words(migration.verified),
        "bias 0": f"{count:,} rows without a usable vector: {name_some(keys)}" if count else None,
        "switched": _switch_words(migration, facts["leads_to"]),
        "not switched": _stayed_words(migration, facts["stayed"]),
    }


def _stayed_words(migration: Migration, aliases: list[str]) -> str | None:
    """Return which aliases a switch has left on the source, and how to move one of them."""
    if not aliases:
        return None
    return STAYED.format(
        names=", ".join(aliases),
        s="" if len(aliases) > 1 else "s",
        source=migration.source_now,
        that="them" if len(aliases) > 1 else "it",
        undo=quote(migration.alias or migration.target),
        run=quote(migration.source),
        first=quote(aliases[0]),
    )


VERIFICATION = (
    "{rows:,} rows, {fields:,} field values equal; {biases:,} biases as computed again; "
    "of {searched:,} rows searched for, {in_copy:,} found ({in_source:,} in the source)"
)


def verification_words(facts: dict[str, Any] | None) -> str | None:
    """Return the figures of a verification in one line."""
    return VERIFICATION.format(**facts) if facts else None


def _switch_words(migration: Migration, leads_to: str | None) -> str | None:
    """Return the name that leads to the copy and the new name of the source, in words."""
    switch = migration.switch
    if switch is None or switch.at is None:
        return None

    since = f"{switch.at:%Y-%m-%d %H:%M:%S} UTC"
    window = f", in {1000 * switch.window:.0f} ms" if switch.window is not None else ""
    renamed = f"; the source is {switch.source_renamed}" if switch.source_renamed else ""
    moved_on = f"; now -> {leads_to}" if leads_to not in {None, migration.target} else ""
    return f"{switch.name} -> {migration.target} since {since}{window}{renamed}{moved_on}"


LINES = {
    "before-copy": "\ncopying {rows_total:,} rows to {target}",
    "after-copy": "copied; catching up with later writes",
    "verified": "verified: {rows:,} rows, {fields:,} field values as in the source",
    "postponed": "the cutover waits for its release; until then the copy follows the source",
    "before-cutover": "switching {alias} to {target}",
    "paused": "paused by {reason}",
    "resumed": "resumed by {reason}",
    "warning": "warning: {message}",
}
"""The lines for events. Other events are for the bars and for machines."""


def printed(progress: Progress) -> Listener:
    """Return a listener that prints lines on standard output, and reports to progress bars."""
    from milvus_hubness.jobs.common.progress import as_events

    bars = as_events(progress)

    def listen(event: Event) -> None:
        bars.report(event.name, **event.facts)
        if event.name == "rate":
            limits = (
                f"{name} {'free' if value is None else value}"
                for name, value in event.facts.items()
            )
            say(f"now at {', '.join(limits)}")
        elif event.name in LINES:
            say(LINES[event.name].format(**event.facts))

    return listen


def stream(event: Event) -> None:
    """Print an event as one JSON object per line, without buffering."""
    show_json(event.to_dict())
    sys.stdout.flush()


def show_last(as_json: bool, facts: Mapping[str, Any], show: Callable[[], object]) -> None:
    """Print a result as the last event or, by calling `show`, as text."""
    from milvus_hubness.jobs.common.progress import Event

    show_result(as_json, Event("result", facts, datetime.now(timezone.utc)).to_dict(), show)


# A step begins with the event of its line, and ends with the next one.
STEPS = {
    "plan": "preparing",
    "before-copy": "copying",
    "after-copy": "catching up",
    "before-verify": "verifying",
    "verified": None,
}


class Timeline:
    """A listener that measures the time of each step. The work of an earlier run does not count."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._step: str | None = None
        self._since: datetime | None = None
        self._bytes = 0
        self._rows_per_second: float | None = None
        self._passes: dict[int, dict[str, int]] = {}

    def __call__(self, event: Event) -> None:
        facts = event.facts
        if event.name == "copying":
            # Reported when a chunk is written: the time until now was copying. What follows the last
            # chunk is the index that the server builds.
            self._step = "copying"
            self._begin("indexing", event.time)
            self._bytes += facts["bytes"]
            self._rows_per_second = facts["rows_per_second"]
        elif event.name in STEPS:
            self._begin(STEPS[event.name], event.time)
        elif event.name == "catching-up" and facts["pass"]:
            self._passes[facts["pass"]] = {"rows": facts["rows"], "carried": facts["repaired"]}

    def to_dict(self) -> dict[str, Any]:
        """Return the seconds by step, the speed of the copy, and the passes, as plain data."""
        copying = self._seconds.get("copying")
        return {
            "seconds": {step: round(seconds, 2) for step, seconds in self._seconds.items()},
            "rows_per_second": round(self._rows_per_second, 1) if self._rows_per_second else None,
            "mib_per_second": round(self._bytes / copying / 2**20, 2) if copying else None,
            "passes": [{"pass": number, **facts} for number, facts in sorted(self._passes.items())],
        }

    def _begin(self, step: str | None, at: datetime) -> None:
        """End the current step, and begin the next."""
        # A step may come several times, such as catching up: its times add up.
        if self._since is not None and self._step:
            earlier = self._seconds.get(self._step, 0.0)
            self._seconds[self._step] = earlier + (at - self._since).total_seconds()
        self._step = step
        self._since = at
