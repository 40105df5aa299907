"""The hub guard of writes: warn of or refuse new rows that look like planted hubs. No I/O.

The biases of a write need the products of its rows with the bank, and the evidence follows from
these. So the guard costs a comparison of each product with one number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from milvus_hubness.basics.logs import log
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import HubRefused, InvalidParameter, name_some

if TYPE_CHECKING:
    from milvus_hubness.correction.guard import Evidence, RowEvidence


def is_guarded(state: CollectionState) -> bool:
    """Whether writes by this state are watched.

    A copy that a job still fills is not: its rows come from the collection, whose guard they passed.
    """
    return state.on_hub != "off" and state.phase == "ready"


def expect_computed(collection: str, state: CollectionState, bias: str) -> None:
    """Raise InvalidParameter for a write without biases that a guard should stop."""
    if is_guarded(state) and state.on_hub == "refuse" and bias == "pending":
        raise InvalidParameter(
            f'bias="pending" would pass the hub guard of {collection!r}: write with bias="compute"'
        )


def guard_rows(
    collection: str,
    state: CollectionState,
    written: RowEvidence | None,
    name_of: Callable[[int], Any],
) -> None:
    """Warn of the rows of a write that look like planted hubs, or refuse them.

    written: the evidence of the rows. name_of: returns the key of the row at a position. Raises
    HubRefused.
    """
    evidence = state.profile.evidence
    # Quantiles need 200 rows; before that, no row can be compared.
    if written is None or evidence is None:
        return
    positions: list[int] = written.stopped(evidence).tolist()
    if positions:
        error = _refusal(collection, state, evidence, written, positions, name_of)
        if state.on_hub == "refuse":
            raise error
        log.warning("%s", error)
    written.remember()


def _refusal(
    collection: str,
    state: CollectionState,
    evidence: Evidence,
    written: RowEvidence,
    positions: list[int],
    name_of: Callable[[int], Any],
) -> HubRefused:
    """Return the error about rows at these positions."""
    first = positions[0]
    bias = float(written.biases[first])
    quantile = evidence.bias_quantile(bias)
    limit = evidence.limit
    reach = None
    seen = f"bias {bias:+.4f}, above the limit of {limit:+.4f}"
    if evidence.reaches and written.reaches is not None:
        reach = float(written.reaches[first])
        above = f"above the limit of {limit:.1%}"
        if reach <= limit:
            above = "more than so many rows of one writer have together"
        seen = (
            f"among the best answers of {reach:.1%} of the bank's queries, {above}, "
            f"bias {bias:+.4f}"
        )

    keys = [name_of(position) for position in positions]
    consequence = "written"
    if state.on_hub == "refuse":
        consequence = "nothing was written: leave the rows out, or set on_hub to warn"
    error = HubRefused(
        f"row {name_some(keys)} of a write to {collection!r} looks like a planted hub ({seen}, "
        f"larger than that of {quantile:.2%} of the gallery): {consequence}"
    )
    error.key = keys[0]
    error.bias = bias
    error.quantile = quantile
    error.reach = reach
    error.rows = tuple(positions)
    return error
