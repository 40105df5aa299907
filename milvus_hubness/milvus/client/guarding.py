"""The hub guard of writes: warn of or refuse new rows that look like planted hubs. No I/O.

The biases of a write need the products of its rows with the bank, and the evidence follows from
these. So the guard costs a comparison of each product with one number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from milvus_hubness.basics.logs import log
from milvus_hubness.correction.state import CollectionState
from milvus_hubness.errors import HubRefused, InvalidParameter, name_some

if TYPE_CHECKING:
    from milvus_hubness.correction.fitted import RowMeasures
    from milvus_hubness.correction.guard import Evidence, RowEvidence
    from milvus_hubness.milvus.client.messages import Bias

MOST_WATCHED = 1_000
"""Fields of collections whose last rows are remembered: a proxy may serve many."""


class HubGuard:
    """Watches the rows of one client or proxy before they are stored: a `WriteListener`."""

    def __init__(self) -> None:
        self._written: dict[tuple[str, str, str], deque[float]] = {}
        """The reaches of the rows that were written last, of each field's bank."""

    def wants(self, collection: str, state: CollectionState, bias: Bias) -> bool:
        """Whether writes by this state are watched.

        A copy that a job still fills is not: its rows come from the collection, whose guard they
        passed. Raises InvalidParameter for a write without biases that the guard should stop.
        """
        if state.on_hub == "off" or state.phase != "ready":
            return False
        if state.on_hub == "refuse" and bias == "pending":
            raise InvalidParameter(
                f'bias="pending" would pass the hub guard of {collection!r}: write with '
                'bias="compute"'
            )
        return True

    def before_stored(
        self,
        collection: str,
        state: CollectionState,
        rows: RowMeasures,
        key_at: Callable[[int], Any],
    ) -> None:
        """Warn of rows that look like planted hubs, or refuse them: raises HubRefused."""
        from milvus_hubness.correction.guard import RowEvidence

        evidence = state.profile.evidence
        # Quantiles need 200 rows; before that, no row can be compared.
        if evidence is None:
            return

        written = RowEvidence(*rows, self._writer(collection, state))
        positions: list[int] = written.stopped(evidence).tolist()
        if positions:
            error = _refusal(collection, state, evidence, written, positions, key_at)
            if state.on_hub == "refuse":
                raise error
            log.warning("%s", error)
        written.remember()

    def _writer(self, collection: str, state: CollectionState) -> deque[float]:
        """Return the reaches of the rows that were written before, by the bank in use."""
        from milvus_hubness.correction.guard import REMEMBERED

        name = (collection, state.field, state.profile.bank.generation)
        if name not in self._written and len(self._written) >= MOST_WATCHED:
            self._written.clear()
        return self._written.setdefault(name, deque(maxlen=REMEMBERED))


def _refusal(
    collection: str,
    state: CollectionState,
    evidence: Evidence,
    written: RowEvidence,
    positions: list[int],
    key_at: Callable[[int], Any],
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

    keys = [key_at(position) for position in positions]
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
