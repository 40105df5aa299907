"""`disable`: the end of a correction without a copy."""

from __future__ import annotations

from milvus_hubness.errors import NotCorrected
from milvus_hubness.jobs.common.fits import forget_fits
from milvus_hubness.jobs.common.lease import Lease, leasing
from milvus_hubness.jobs.store.helpers import left_helpers
from milvus_hubness.jobs.store.ownership import SIDE_PROPERTY, side_helpers
from milvus_hubness.jobs.store.protocols import Store, expect_store
from milvus_hubness.jobs.store.records import CollectionInfo


def disable(store: Store, collection: str, *, field: str | None = None) -> str | None:
    """Remove the biases that are stored outside a collection's vectors; the bank stays.

    After an interruption, call it again. Return the name of the dropped side collection. Raises
    NotCorrected, and InvalidInput if several fields are corrected and none is named.
    """
    expect_store(store)
    with leasing(store, collection) as (lease, info):
        store = lease.store
        state = info.state_of(field)
        if state is None:
            return _finish_disabling(lease, info)

        if not state.codec.leaves_vectors:
            raise NotCorrected(
                f"{info.name!r} has its biases in its vectors: undo that with migrate rollback"
            )

        filling = [state.with_profile(state.filling)] if state.filling is not None else []
        forget_fits(store, [state, *filling])
        # The state goes before the biases, so that no client or job looks for them.
        store.write_property(info.name, state.property_name, None)
        sides = side_helpers([state])
        for side in sides:
            lease.drop_helper(side, info.collection_id)
        return sides[state.profile.slot].collection if sides else None


def _finish_disabling(lease: Lease, info: CollectionInfo) -> str:
    """Drop what an interrupted job has left of the correction of a collection.

    Return the name of one of the dropped collections. Raises NotCorrected if there are none.
    """
    store = lease.store
    left = left_helpers(store, info, SIDE_PROPERTY)
    if not left:
        raise NotCorrected(f"{info.name!r} is not corrected: there is nothing to disable")

    for side in left:
        lease.drop(side)
    return left[0]
