"""Helper collections that kept their names when their collection was renamed elsewhere."""

from __future__ import annotations

from milvus_hubness.basics.logs import audit
from milvus_hubness.errors import InvalidInput, NotCorrected
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.store.helpers import complete_rename, expect_helpers, list_helpers
from milvus_hubness.jobs.store.ownership import CollectionId
from milvus_hubness.jobs.store.protocols import Renaming, Store, capability, expect_store


def adopt(store: Store, collection: str, *, renamed_from: str) -> list[str]:
    """List the helper collections of a renamed collection for its new name, and return their names.

    After a rename by a plain client, the names of the side collection, the query samples and the
    bank are derived from the former name. Clients and jobs refuse them, because a stranger could
    have named them in the collection's properties; the caller says that they are right. Raises
    NotCorrected, InvalidInput if another collection has the former name and uses one of them,
    StateError if one belongs to another collection, and LeaseHeld.
    """
    expect_store(store)
    capability(store, Renaming)
    name = store.info(collection, counted=False, checked=False).name
    with Lease(store, name) as lease:
        store = lease.store
        # Unchecked: the check would refuse just the helpers that are adopted here.
        info = store.info(name, counted=False, checked=False)
        if not info.states:
            raise NotCorrected(f"{name!r} is not corrected: it has no helper collections to adopt")

        former = CollectionId(name=renamed_from, identity=info.identity)
        expect_helpers(store, info.helpers, former)

        names = {helper.collection for helper in info.helpers}
        if store.exists(renamed_from):
            successor = store.info(renamed_from, counted=False, checked=False)
            shared = names & {helper.collection for helper in successor.helpers}
            if shared and successor.name != name:
                raise InvalidInput(
                    f"{renamed_from!r} exists again and uses {min(shared)!r}: disable the "
                    "correction of one of the two"
                )

        # Listed first: `complete_rename` marks only helpers that the
        # ledger lists. A run that is killed in between is repeated.
        list_helpers(store, info.helpers, info.states.values(), former, info.collection_id)
        complete_rename(store, renamed_from, name)
        adopted = sorted(store.listed_helpers(info.collection_id))
        audit("adopted", name, renamed_from=renamed_from, helpers=adopted)
        return adopted
