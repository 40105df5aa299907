"""A plan: which biases a field gets, and where they are kept.

`milvus_hubness.jobs.plan` makes plans, without a write; `migrate` and `enable` carry them out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from milvus_hubness.basics.notebooks import ShownAsTable
from milvus_hubness.basics.progress import Progress
from milvus_hubness.basics.words import expect_instance
from milvus_hubness.correction.fitted import Correction, initial_state
from milvus_hubness.correction.state import BankReference, CollectionState
from milvus_hubness.errors import InvalidInput, InvalidParameter
from milvus_hubness.jobs.common.choice import Chosen
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import CollectionInfo, VectorField


class PlannedBody(ABC):
    """What a plan finds out about the place of the biases: a copy, or beside the vectors."""

    job: ClassVar[str]
    """The function that carries such plans out."""

    @abstractmethod
    def facts(self, plan: Plan[Any]) -> dict[str, Any]:
        """Return what the plan says of it, as plain data."""


Planned = TypeVar("Planned", bound=PlannedBody)


@dataclass(frozen=True, eq=False, kw_only=True)
class Draft:
    """A field that can be corrected, before its biases are chosen."""

    source: CollectionInfo
    """The collection; for a copy, described with the index of the copy."""
    field: str
    suffix: str
    """The end of the names of the hidden fields, see CollectionState."""
    bank_collection: str
    """The collection that holds the bank's generations."""

    @property
    def vector(self) -> VectorField:
        """The field as the database describes it."""
        return self.source.vector_fields[self.field]

    def expect_bank_apart(self, *names: str | None) -> None:
        """Raise InvalidInput if the bank would have one of these names, which the job gives away too."""
        if self.bank_collection in names:
            raise InvalidInput(
                f"{self.bank_collection!r} cannot be the bank, as this job uses the name itself: choose "
                "another one with --bank-name"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan(Draft, ShownAsTable, Generic[Planned]):
    """A plan to correct `field` of `source`."""

    chosen: Chosen
    """The biases, before they are fitted."""
    remarks: tuple[str, ...]
    """What the user should know before the run."""
    body: Planned
    """Where the biases go, and what that takes."""

    def first_state(
        self, correction: Correction, bank: BankReference, **others: Any
    ) -> CollectionState:
        """Return the state of the collection with the fitted biases, whose bank is stored.

        others: its phase, and what only one kind of place for biases has. Raises InvalidParameter.
        """
        return initial_state(
            correction.layout,
            correction.fitted.estimator,
            bank,
            field=self.field,
            suffix=self.suffix,
            dtype=self.vector.dtype,
            source=self.source.name,
            mean_bias=correction.mean_bias,
            strength=self.chosen.strength,
            gate=self.chosen.gate,
            prior=correction.prior,
            kinds=correction.kinds,
            evidence=correction.evidence,
            on_hub=self.chosen.on_hub,
            **others,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for people and for --json."""
        return {
            "source": self.source.name,
            "field": self.field,
            "metric": self.chosen.layout.metric,
            "bank": self.chosen.bank_facts(self.bank_collection),
            **self.chosen.facts,
            **self.body.facts(self),
            "remarks": list(self.remarks),
        }


def expect_plan(plan: object, body: type[PlannedBody]) -> None:
    """Raise InvalidParameter unless this is a plan whose body is of this class."""
    expect_instance("plan", plan, Plan, "pass what plan_correction returns")
    assert isinstance(plan, Plan)
    if not isinstance(plan.body, body):
        raise InvalidParameter(
            f"the plan for {plan.source.name!r} cannot be carried out by {body.job}: pass it to "
            f"{plan.body.job}"
        )


class Body(ABC, Generic[Planned]):
    """Where the biases of a plan are to be kept, as a caller chooses it."""

    @abstractmethod
    def expect_correctable(self, store: Store, draft: Draft, recipe: Recipe) -> None:
        """Raise CannotMigrate, AlreadyCorrected, EmptyCollection, InvalidInput if such biases are not
        possible.
        """

    @abstractmethod
    def planned(
        self, store: Store, draft: Draft, recipe: Recipe, progress: Progress
    ) -> Plan[Planned]:
        """Choose the biases, and measure what their place takes. recipe: with its vectors read."""
