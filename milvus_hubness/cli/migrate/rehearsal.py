"""The rehearsal of milvus-hubness migrate run: all but the switch, and what it took."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from milvus_hubness.cli.console import say, show_facts
from milvus_hubness.cli.migrate import options
from milvus_hubness.cli.migrate.carrying import alias_of, carry_out
from milvus_hubness.cli.migrate.show import migration_facts, migration_words, show_last
from milvus_hubness.cli.options import APPLICATION_TOKEN_VARIABLE, FILE_SUFFIX, Connection
from milvus_hubness.errors import InvalidParameter

if TYPE_CHECKING:
    from milvus_hubness.jobs.migration.ledger import Migration
    from milvus_hubness.jobs.migration.rights import TriesRights
    from milvus_hubness.jobs.store.protocols import Store


def rehearse(
    source: str,
    planning: options.Planning,
    switching: options.Switching,
    pace: options.Pace,
    watching: options.Watching,
    connection: Connection,
    extent: options.Extent,
    *,
    as_json: bool,
) -> None:
    """Do everything except the cutover, on real data, and report what it took."""
    from milvus_hubness.cli.migrate.session import Session
    from milvus_hubness.jobs.migration.ledger import RENAMED

    session = Session(watching, pace, as_json=as_json)
    application = _application(connection)
    store, migration = carry_out(
        connection,
        source,
        planning,
        watching,
        session,
        switching,
        is_rehearsal=True,
        measure=extent.measure,
    )

    alias = switching.alias or alias_of(store, migration, source)
    source = migration.source
    target = migration.target

    cutover = ("migrate", "cutover", source)
    # The command that moves each name, and what it does.
    switches = {
        connection.command(*cutover, "--alias", alias): f"{alias} leads to {target}",
        connection.command(*cutover, "--rename"): (
            f"{source} becomes {RENAMED.format(source)}, and {source} an alias of {target}"
        ),
    }

    # Linux counts in KiB, macOS in bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    units_per_mib = 2**20 if sys.platform == "darwin" else 2**10
    report = {
        "source": source,
        "target": target,
        **session.timeline.to_dict(),
        "peak_memory_mib": round(peak / units_per_mib, 1),
        "passes_in_all": migration.passes,
        "verification": migration.verified,
        "invalid": migration.invalid,
        "invalid_keys": list(migration.invalid_keys),
        "application": _tried(application, store, migration),
        "cutover": [f"{command}: {effect}" for command, effect in switches.items()],
        "clean": connection.command("migrate", "clean", source, "--drop", target),
    }
    show_last(as_json, report, lambda: _show_rehearsal(report, switches, store, migration))


def _application(connection: Connection) -> TriesRights | None:
    """Return what tries the rights of an application; None without its token.

    Before the rehearsal, so that a wrong token ends it at once. Raises InvalidParameter.
    """
    from milvus_hubness.jobs.migration.rights import TriesRights

    store = connection.open_as_application()
    if store is None:
        return None
    if not isinstance(store, TriesRights):
        raise InvalidParameter(
            f"rights can be tried on Milvus only: unset ${APPLICATION_TOKEN_VARIABLE} "
            f"or ${APPLICATION_TOKEN_VARIABLE}{FILE_SUFFIX}"
        )
    return store


def _tried(
    application: TriesRights | None, store: Store, migration: Migration
) -> dict[str, Any] | None:
    if application is None:
        return None

    from milvus_hubness.jobs.migration.rights import try_rights

    names = [migration.source, *store.info(migration.source).aliases]
    return asdict(try_rights(application, migration, names))


def _application_words(tried: dict[str, Any] | None) -> str | None:
    if tried is None:
        return None
    if not tried["has"]:
        return "may neither search nor write to the source: is it another token?"

    lacking = [f"{', '.join(rights)} on {name}" for name, rights in tried["lacks"].items()]
    has = ", ".join(tried["has"])
    return f"has {has} on the source; lacks {'; '.join(lacking) or 'nothing for the copy'}"


def _show_rehearsal(
    report: dict[str, Any], switches: dict[str, str], store: Store, migration: Migration
) -> None:
    rows = report["rows_per_second"]
    mib = report["mib_per_second"]
    facts = {
        **{step: f"{seconds:,.1f} s" for step, seconds in report["seconds"].items()},
        "speed": f"{rows:,.0f} rows/s, {mib:,.2f} MiB/s of vectors" if rows and mib else None,
        "peak memory": f"{report['peak_memory_mib']:,.0f} MiB",
        **migration_words(migration, migration_facts(store, migration)),
        "passes": "; ".join(
            "{carried:,} of {rows:,} rows carried over".format(**facts)
            for facts in report["passes"]
        ),
        "application": _application_words(report["application"]),
    }
    show_facts("\nRehearsed: {source} -> {target}".format(**report), facts)
    say("\nNo name was moved: the application reads the source.")
    # Each command on one line, to be copied: a table would fold it.
    for command, effect in switches.items():
        say(f"To switch:  {command}\n            {effect}")
    say(f"To drop it: {report['clean']}")
