"""What a user asks for about the biases of a collection: `Recipe`.

A new word of the recipe is a field here, an option in `milvus_hubness.cli.options.RecipeOptions`, and a
step in `milvus_hubness.jobs.common.choice`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from typing import Any, cast

from milvus_hubness.basics.defaults import WHERE_FROM, OnHub, VerdictMode
from milvus_hubness.basics.words import expect_word
from milvus_hubness.correction.banks.bank import BankLike, QueryBank, optional_bank
from milvus_hubness.correction.estimators import Estimator
from milvus_hubness.correction.estimators.base import expect_estimator
from milvus_hubness.correction.rerank import DynamicGate
from milvus_hubness.errors import InvalidInput, InvalidParameter
from milvus_hubness.jobs.common.judging import Judging
from milvus_hubness.jobs.common.kinds import KindRequest
from milvus_hubness.jobs.common.priors import PriorLike, PriorRequest
from milvus_hubness.jobs.common.samples import VECTORS, is_in_database, read_from_database
from milvus_hubness.jobs.store.protocols import Store


@dataclass(frozen=True, eq=False)
class Recipe:
    """Which biases a collection gets.

    Every job takes it, or a bank alone in its place. What is not named follows the verdict on the
    bank, then the biases in use, then the defaults. Raises InvalidInput, InvalidParameter, and as
    QueryBank does.
    """

    bank: BankLike | str | None = None
    """Reference queries, (m, d), or the name of their file; "samples" for those that clients sampled,
    "collection:NAME" for the vectors of a collection. By default those in use.
    """
    _: KW_ONLY
    target_bank: BankLike | str | None = None
    """Reference items in the same forms, for methods that need them; by default those in use."""
    estimator: Estimator | None = None
    """The method; by default the choice of tuning on this bank, with its strength."""
    gate: int | None = None
    """The k of a DynamicGate; 0 for none. By default that of tuning, if its choice is followed."""
    prior: PriorLike | None = None
    """A field of the rows, or clicks by key, that says how often each row is wanted; "bank" for the
    demand that the bank itself shows. By default the present prior, if there is one.
    """
    prior_weight: float | None = None
    """λ in units of the spread of scores; by default that of tuning, else the present one, else 0."""
    no_prior: bool = False
    """Drop the prior."""
    kind: str | None = None
    """A field of the rows that says of which kind each is, such as its modality or language, with at
    most 16 values; or "auto" for the two kinds that the vectors themselves show, if they do.
    """
    queries: BankLike | str | None = None
    """Real queries without labels, apart from the bank, at least 20, on which it is judged; by default
    those that clients sampled, where a collection is corrected, and without any half of the bank.
    """
    verdict: VerdictMode | None = None
    """What becomes of a verdict against the bank: see VerdictMode; by default that of
    $MILVUS_HUBNESS_VERDICT, else "require", with which a job raises CorrectionNotRecommended before
    its first write.
    """
    on_hub: OnHub | None = None
    """What clients do with new rows that look like planted hubs, see OnHub; by default nothing."""

    @classmethod
    def of(cls, recipe: Recipe | BankLike | str | None) -> Recipe:
        """Return the recipe itself, or one of a bank alone."""
        return recipe if isinstance(recipe, Recipe) else cls(recipe)

    def __post_init__(self) -> None:
        for name in VECTORS:
            given = getattr(self, name)
            if not is_in_database(given, as_bank=name == "bank"):
                object.__setattr__(self, name, optional_bank(given))

        expect_estimator(self.estimator)
        checked_gate(self.gate)
        if self.on_hub is not None:
            expect_word("on_hub", self.on_hub, OnHub)
        # They raise if what is named does not go together.
        _ = self.judging, self.prior_request
        self.kind_request.expect_no_targets(self.target_bank)

    def read(self, store: Store, collection: str, field: str | None = None) -> Recipe:
        """Return the recipe with the vectors that it names of this database.

        collection, field: whose samples "samples" are. Raises as `read_from_database` does.
        """
        found: dict[str, Any] = read_from_database(store, vars(self), collection, field)
        return replace(self, **found) if found else self

    def expect_only(self, job: str, *words: str) -> None:
        """Raise InvalidParameter for a word that a job cannot follow. words: those that it can."""
        for field in fields(self):
            if field.name not in words and getattr(self, field.name) is not field.default:
                raise InvalidParameter(f"{job} takes no {field.name}: leave it out of the recipe")

    def required_bank(self, collection: str) -> QueryBank:
        """Return the bank. Raises InvalidInput if none is named."""
        if self.named_bank is None:
            raise InvalidInput(
                f"{collection!r} has no reference queries yet: pass a bank ({WHERE_FROM})"
            )
        return self.named_bank

    @property
    def named_bank(self) -> QueryBank | None:
        """The bank that is named, of a recipe that is read."""
        return cast("QueryBank | None", self.bank)

    @property
    def named_targets(self) -> QueryBank | None:
        """The target bank that is named, of a recipe that is read."""
        return cast("QueryBank | None", self.target_bank)

    @property
    def named_queries(self) -> QueryBank | None:
        """The real queries that are named, of a recipe that is read."""
        return cast("QueryBank | None", self.queries)

    @cached_property
    def judging(self) -> Judging:
        """How the bank is judged."""
        queries = None if isinstance(self.queries, str) else self.queries
        return Judging.of(self.verdict, queries)

    @cached_property
    def prior_request(self) -> PriorRequest:
        """The prior that is named."""
        return PriorRequest.of(self.prior, self.prior_weight, is_dropped=self.no_prior)

    @property
    def kind_request(self) -> KindRequest:
        """The kinds that are named."""
        return KindRequest.of(self.kind)

    @property
    def names_biases(self) -> bool:
        """Whether a bank or an estimator is named."""
        return not (self.bank is None and self.target_bank is None and self.estimator is None)


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
