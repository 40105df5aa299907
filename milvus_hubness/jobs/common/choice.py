"""The choice of a plan: the estimator to fit, its strength and the gates of searches.

The caller's own choice comes first, then that of `tune` for this bank, then the default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from milvus_hubness.basics.texts import describe
from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import Blend, Estimator, from_dict
from milvus_hubness.correction.rerank import DynamicGate
from milvus_hubness.errors import CorrectionNotRecommended, InvalidInput, InvalidParameter
from milvus_hubness.jobs.store.records import CollectionInfo


class Gates(NamedTuple):
    """The gates of searches, as DynamicGate has them."""

    gate: int | None = None
    """k over bank queries; None, or 0 from a caller, for no gate."""
    gate_targets: int | None = None
    """k over target items, which widens the gate; None for none."""


NO_GATES = Gates()


@dataclass(frozen=True)
class Choice:
    """What a plan fits, and how strongly searches apply it."""

    estimator: Estimator
    strength: float = 1.0
    gates: Gates = NO_GATES


def checked_gates(gates: Gates, target_bank: QueryBank | None) -> Gates:
    """Return the valid k and k_targets of a DynamicGate; a gate of 0 is none.

    Raises InvalidParameter, InvalidInput.
    """
    # A caller turns the gates of tuning off by a gate of 0.
    if not gates.gate and gates.gate_targets is None:
        return NO_GATES
    if not gates.gate:
        raise InvalidInput("gate_targets widens the gate over bank queries: give gate too")

    if gates.gate_targets is not None and target_bank is None:
        raise InvalidInput(
            "gate_targets counts the nearest rows of target items: give a target bank"
        )

    try:
        valid = DynamicGate(gates.gate, gates.gate_targets)
    except InvalidParameter as error:
        # DynamicGate calls them k and k_targets, the caller does not.
        named = "gate" if gates.gate_targets is None else "gate, gate_targets"
        raise InvalidParameter(f"{named}: {error}") from None

    return Gates(valid.k, valid.k_targets)


def choose(
    info: CollectionInfo,
    field: str,
    bank: QueryBank,
    target_bank: QueryBank | None,
    estimator: Estimator | None,
    gates: Gates,
    *,
    force: bool,
) -> Choice:
    """Return the estimator to fit, with its strength and the gates.

    estimator: the caller's, at strength 1; without one, the choice of tuning for this bank counts,
    else Blend(). gates: the caller's, which overrule those of tuning.

    Raises CorrectionNotRecommended if tuning advises against
    this bank, unless `force`, and as `checked_gates` does.
    """
    tuning = info.verdicts.of(field, bank.fingerprint)
    if tuning is not None and tuning.verdict == "leave it alone" and not force:
        raise CorrectionNotRecommended(
            f"tuning advises to leave {info.name!r} alone: {tuning.reason} (force overrides)"
        )

    # A method of the caller's own is applied in full: tuning has measured another one.
    strength = 1.0
    if estimator is None and tuning is not None and tuning.choice is not None:
        estimator = from_dict(tuning.choice)
        strength = tuning.strength
        if gates == NO_GATES:
            gates = Gates(tuning.gate, tuning.gate_targets)

    return Choice(estimator or Blend(), strength, checked_gates(gates, target_bank))


def verdict_remarks(
    info: CollectionInfo, field: str, bank: QueryBank, *, is_followed: bool
) -> list[str]:
    """Return the verdict of tuning on a bank and its date, or that there is none.

    is_followed: whether the plan follows the verdict, because the caller names no method.
    """
    verdict = info.verdicts.of(field, bank.fingerprint)
    if verdict is not None:
        method = describe(verdict.choice) if verdict.choice else "no method"
        at = f"{verdict.tuned_at:%Y-%m-%d %H:%M} UTC"
        return [
            f"verdict of tune on this bank, {at}: {verdict.verdict}, {method}, "
            f"strength {verdict.strength:g}"
        ]

    if not is_followed:
        return []

    others = len(info.verdicts.records)
    elsewhere = f", but on {others} other bank{'s' * (others > 1)}" if others else ""
    return [
        f"tune has no verdict on this bank{elsewhere}: the default method applies; "
        "run tune with it to choose one"
    ]


def bank_facts(bank: QueryBank, target_bank: QueryBank | None, collection: str) -> dict[str, Any]:
    """Return what a plan says of its bank, as plain data."""
    return {
        "collection": collection,
        "source": bank.source,
        "queries": len(bank),
        "fingerprint": bank.fingerprint,
        "targets": len(target_bank) if target_bank else 0,
    }
