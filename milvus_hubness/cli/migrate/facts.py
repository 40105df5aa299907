"""Plans, migrations and verifications as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from milvus_hubness.cli.console import show_facts
from milvus_hubness.cli.estimator_options import describe
from milvus_hubness.jobs.migration.ledger import Migration

TOLD_TOGETHER = {
    "source", "target", "field", "dtype", "index_type", "index_params", "metric", "rows", "dim", "width",
    "vector_bytes", "partitions", "hidden_fields", "bank", "estimator", "strength", "gate", "gate_targets",
    "alias", "rename", "estimated_seconds", "waiting_seconds", "remarks", "server", "memory_bytes", "recall",
}  # fmt: skip


def show_plan(plan: dict[str, Any]) -> None:
    """Every fact of a plan; those that have no words of their own under their names."""
    sizes = {side: _mib(size) for side, size in plan["vector_bytes"].items()}
    loaded = {side: _mib(size) for side, size in plan["memory_bytes"].items()}
    waits = plan["waiting_seconds"]
    further = {
        name.replace("_", " "): _words(fact) for name, fact in plan.items() if name not in TOLD_TOGETHER
    }
    show_facts(
        f"Migration of {plan['source']}",
        {
            "would create": plan["target"],
            "vector field": f"{plan['field']}, {plan['dtype']}, {plan['index_type']} "
            f"{plan['index_params'] or ''}".rstrip(),
            "metric": f"{plan['metric']}, served as IP",
            "rows": f"{plan['rows']:,}",
            "width": f"{plan['dim']} -> {plan['width']} ({sizes['source']} -> {sizes['target']} of vectors)",
            "partitions": ", ".join(plan["partitions"]),
            "fields added": ", ".join(plan["hidden_fields"]),
            "bank": f"{plan['bank']['queries']:,} queries of {plan['bank']['source']}, "
            f"kept as {plan['bank']['collection']}",
            "estimator": f"{describe(plan['estimator'])}, strength {plan['strength']:g}",
            "gate": plan["gate"],
            "gate over targets": plan["gate_targets"],
            "alias": plan["alias"],
            "rename": f"{plan['source']} becomes an alias of the copy" if plan["rename"] else None,
            "server": plan["server"],
            "memory": f"{loaded['source']} now, {loaded['target']} for the copy, {loaded['both']} for both",
            "recall": plan["recall"] and plan["recall"]["said"],
            **further,
            "about": f"{plan['estimated_seconds']} s (from a sample, read only)"
            + (f", {plan['waiting_seconds']} s of it for clients to hear of it" if waits else ""),
            "note": "\n".join(plan["remarks"]),
        },
    )


def migration_facts(migration: Migration) -> dict[str, Any]:
    """A migration as plain data, less what only the program needs."""
    return migration.model_dump(mode="json", exclude={"version", "arguments", "state", "announced_at"})


def show_migration(migration: Migration) -> None:
    """How a migration stands once a command is done with it."""
    show_facts(
        f"\n{migration.source} -> {migration.target}: {migration.phase}",
        {
            "bank": migration.bank_collection,
            "verified": verification_words(migration.verified),
            "bias 0": invalid_words(migration.invalid, migration.invalid_keys),
            "passes": f"{migration.passes} to catch up",
            "switched": switch_words(migration),
        },
    )


def verification_words(found: dict[str, Any] | None) -> str | None:
    """The figures of a verification in one line."""
    if found is None:
        return None
    return (
        f"{found['rows']:,} rows, {found['fields']:,} field values equal; {found['biases']:,} biases as "
        f"computed anew; of {found['searched']:,} rows searched for, {found['found_in_copy']:,} found "
        f"({found['found_in_source']:,} in the source)"
    )


def invalid_words(count: int, keys: Sequence[int | str]) -> str | None:
    """Which rows carry no bias, if any."""
    return f"{count} rows without a usable vector: {list(keys)}" if count else None


def switch_words(migration: Migration) -> str | None:
    """Which name leads to the copy, and what became of the source's."""
    switch = migration.switch
    if switch is None or switch.at is None:
        return None
    kept = f"; the source is {switch.kept_as}" if switch.kept_as else ""
    window = f", in {1000 * switch.window:.0f} ms" if switch.window is not None else ""
    return f"{switch.name} -> {migration.target} since {switch.at:%Y-%m-%d %H:%M:%S} UTC{window}{kept}"


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _words(fact: Any) -> str:
    if isinstance(fact, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_words(value)}" for name, value in fact.items())
    if isinstance(fact, list | tuple):
        return ", ".join(map(_words, fact))
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    if fact is None:
        return ""
    return f"{fact:,}" if isinstance(fact, int | float) else str(fact)
