"""The choice of a plan: the estimator to fit, its strength and the gate of searches.

The caller's own choice comes first, then that of the verdict on this bank, then the default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from milvus_hubness.correction.banks.bank import QueryBank
from milvus_hubness.correction.estimators import DEFAULT_ESTIMATOR, Estimator, from_dict
from milvus_hubness.correction.kinds import KindRule
from milvus_hubness.correction.rerank import DynamicGate
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.jobs.common.judging import Judging
from milvus_hubness.jobs.store.records import CollectionInfo, TuningRecord


@dataclass(frozen=True)
class Choice:
    """What a plan fits, and how strongly searches apply it."""

    estimator: Estimator
    strength: float = 1.0
    gate: int | None = None
    """The k of `DynamicGate`; None corrects every query."""


def checked_gate(gate: int | None) -> int | None:
    """Return the valid k of a DynamicGate; None for 0, by which a caller turns a gate off.

    Raises InvalidParameter.
    """
    if not gate:
        return None
    try:
        return DynamicGate(gate).k
    except InvalidParameter as error:
        # DynamicGate calls it k, the caller does not.
        raise InvalidParameter(f"gate: {error}") from None


def choose(
    verdict: TuningRecord | None,
    estimator: Estimator | None,
    gate: int | None,
    *,
    by_kind: bool = False,
    are_gated: bool = True,
) -> Choice:
    """Return the estimator to fit, with its strength and the gate.

    verdict: on the bank, with the kinds of the plan. estimator: the caller's, at strength 1;
    without one, the choice of the verdict counts, else the default. gate: the caller's, which
    overrules that of the verdict; 0 for none. by_kind: whether the plan has kinds. are_gated:
    whether clients of the database gate searches; without, that of the verdict does not count.

    Raises as `checked_gate` does.
    """
    # A method of the caller's own is applied in full: the verdict is about another one.
    strength = 1.0
    is_against = verdict is not None and verdict.verdict == "leave it alone"
    if estimator is None and verdict is not None and not is_against:
        strength = verdict.strength
        if verdict.choice is not None:
            estimator = from_dict(verdict.choice)
        if gate is None and are_gated:
            gate = verdict.gate

    default = default_estimator(by_kind=by_kind)
    return Choice(estimator or default, strength, checked_gate(gate))


def default_estimator(*, by_kind: bool) -> Estimator:
    """Return the method that applies where nobody chooses one; by kind, in full."""
    if not by_kind:
        return DEFAULT_ESTIMATOR
    # The agreement of the bank's halves is low where much of the scores is a matter of kinds, and with
    # their means taken off nothing is left to be careful about (`benchmarks.mixed_forms`: with means of
    # vectors no gallery loses at full strength, and three of eleven do with the agreement).
    return DEFAULT_ESTIMATOR.in_full()


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
            "to migrate"
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
