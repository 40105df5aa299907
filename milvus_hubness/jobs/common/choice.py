"""The choice of a plan: the estimator to fit, its strength and the gates of searches.

The caller's own choice comes first, then that of the verdict on this bank, then the default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import DEFAULT_ESTIMATOR, Estimator, from_dict
from milvus_hubness.correction.kinds import KindRule
from milvus_hubness.correction.rerank import DynamicGate
from milvus_hubness.errors import InvalidInput, InvalidParameter
from milvus_hubness.jobs.common.judging import Judging
from milvus_hubness.jobs.common.kinds import suited_to_kinds
from milvus_hubness.jobs.store.records import CollectionInfo, TuningRecord


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
    verdict: TuningRecord | None,
    target_bank: QueryBank | None,
    estimator: Estimator | None,
    gates: Gates,
    *,
    by_kind: bool = False,
) -> Choice:
    """Return the estimator to fit, with its strength and the gates.

    verdict: on the bank, with the kinds of the plan. estimator: the caller's, at strength 1;
    without one, the choice of the verdict counts, else the default. gates: the caller's, which
    overrule those of the verdict. by_kind: whether the plan has kinds.

    Raises as `checked_gates` does.
    """
    # A method of the caller's own is applied in full: the verdict is about another one.
    strength = 1.0
    is_against = verdict is not None and verdict.verdict == "leave it alone"
    if estimator is None and verdict is not None and not is_against:
        strength = verdict.strength
        if verdict.choice is not None:
            estimator = from_dict(verdict.choice)
        if gates == NO_GATES:
            gates = Gates(verdict.gate, verdict.gate_targets)

    default = suited_to_kinds(DEFAULT_ESTIMATOR) if by_kind else DEFAULT_ESTIMATOR
    return Choice(estimator or default, strength, checked_gates(gates, target_bank))


def verdict_remarks(
    verdict: TuningRecord | None, info: CollectionInfo, judging: Judging, *, is_followed: bool
) -> list[str]:
    """Return that there is no verdict on a bank, and what follows from that; nothing if there is one.

    is_followed: whether the plan would follow it, because the caller names no method.
    """
    if verdict is not None:
        return []
    if judging.mode != "skip":
        return [f"{info.name!r} has too few rows to judge the bank on"]
    if not is_followed:
        return []

    others = len(info.verdicts.records)
    elsewhere = f", but on {others} other bank{'s' * (others > 1)}" if others else ""
    return [
        f"there is no verdict on this bank{elsewhere}: the default method applies; "
        "run tune with it to choose one"
    ]


def kind_remarks(
    info: CollectionInfo, field: str, bank: QueryBank, kind: str | None, kinds: KindRule | None
) -> list[str]:
    """Return that tuning chose otherwise about kinds than a plan does; nothing if it did not.

    kind: what the caller names. kinds: those of the plan.
    """
    record = info.verdicts.compared(field, bank.fingerprint)
    if record is None:
        return []
    if kind is None and record.kind:
        return [
            f"tune found searches better by the kinds of {record.kind!r}: pass --kind {record.kind} "
            "(with --where second_vector, if without a copy)"
        ]
    if kinds is not None and not record.kind and record.kind_tried == kinds.source:
        return [
            f"tune found searches no better by the kinds of {record.kind_tried!r}: leave --kind out"
        ]
    return []


def bank_facts(bank: QueryBank, target_bank: QueryBank | None, collection: str) -> dict[str, Any]:
    """Return what a plan says of its bank, as plain data."""
    return {
        "collection": collection,
        "source": bank.source,
        "queries": len(bank),
        "fingerprint": bank.fingerprint,
        "targets": len(target_bank) if target_bank else 0,
    }
