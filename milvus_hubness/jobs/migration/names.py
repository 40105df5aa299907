"""Which name of the application moves to the copy."""

from __future__ import annotations

from milvus_hubness.errors import CollectionExists, InvalidInput
from milvus_hubness.jobs.migration.ledger import Switch
from milvus_hubness.stores.base import Store

KEPT_AS = "{}__before_hubness"


def chosen_switch(store: Store, source: str, target: str, alias: str | None, rename: bool) -> Switch:
    """An alias moved from source to target, or source renamed and its name made an alias of target. Raises
    InvalidInput where that cannot be, CollectionExists where the name for the source is taken."""
    if (alias is None) == (not rename):
        raise InvalidInput("give either the alias that the application uses, or rename: one name is moved")
    if rename and not store.renames():
        raise InvalidInput(
            f"this database gives no collection another name: have {source!r} read by an alias"
        )
    if alias is None:
        kept_as = KEPT_AS.format(source)
        if store.exists(kept_as):
            raise CollectionExists(f"the source would be renamed to {kept_as!r}, which is taken")
        return Switch(name=source, kept_as=kept_as)
    if alias in {source, target}:
        raise InvalidInput(f"alias {alias!r} is the name of a collection of this migration")
    behind = store.alias_target(alias)
    if behind is None and store.exists(alias):
        raise InvalidInput(f"{alias!r} is a collection, not an alias")
    if behind not in {None, source, target}:
        raise InvalidInput(f"alias {alias!r} points at {behind!r}, not at {source!r}")
    return Switch(name=alias)
