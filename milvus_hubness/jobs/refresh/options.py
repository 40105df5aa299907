"""The options of a refresh."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from milvus_hubness.basics.defaults import DEFAULT_MEASURE, KEEP_FORMER
from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.basics.words import expect_instance, expect_word
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.jobs.common.judgements import Judgements, expect_judgements
from milvus_hubness.jobs.common.judging import Judging
from milvus_hubness.jobs.common.lease_records import default_client_ttl, expect_client_ttl
from milvus_hubness.jobs.common.progress import Throttle
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.quality.retrieval import Measure

Refit = Literal["pending", "changed", "always"]


@dataclass(frozen=True, eq=False)
class RefreshOptions:
    """Options of a refresh. Raises InvalidParameter, and as QueryBank does."""

    recipe: Recipe = field(default_factory=Recipe)
    """Which biases the collection gets, or a bank alone: what it does not name stays as it is, or follows
    the choice of tuning since the last refresh. The kinds of the rows and the hub guard stay.
    """
    profile: str | None = None
    """The bias profile to refresh, by default the active one; a new name adds a profile, from the
    given bank.
    """
    refit: Refit | float = "changed"
    """When all biases are computed anew. "changed": once the bank, the method, the prior or the values
    of its field have changed. A share of the rows, above 0 and up to 1: also with the sampled queries as
    bank, as soon as so many are new or changed since the bank was fitted; without enough samples, a
    new bank is due. "always": though nothing changed, for estimators that learn from the gallery.
    "pending": as "changed", but no field is read again, so that often only rows without a bias get theirs.
    """
    force: bool = False
    """Compute and write all biases again though nothing changed, which repairs damaged ones, and
    use new biases even if they are worse than the old ones.
    """
    judgements: Judgements | None = None
    """Queries with right rows for the evaluation."""
    measure: str = DEFAULT_MEASURE
    """What the evaluation measures on these: R@k, MRR, MAP or nDCG@k."""
    rename: bool = False
    """Rename a collection that is called by its own name, so that this becomes an alias of the copy;
    without it, only aliases move to the copy.
    """
    keep_former: int = KEEP_FORMER
    """Number of former copies that stay; those before are dropped if jobs have made them."""
    restart_ttl: bool = False
    """Write all rows although the collection has a
    time to live, which starts again for each of them.
    """
    client_ttl: float = field(default_factory=default_client_ttl)
    """The longest state_ttl of a HubnessClient that writes, in seconds."""
    throttle: Throttle = field(default_factory=Throttle)
    """Slows the writes down, pauses them, and stops them between two batches."""
    progress: Progress = silent
    """Called with the phase, the rows done and all rows."""
    field: str | None = None
    """The corrected field, if there are several."""

    def __post_init__(self) -> None:
        recipe = Recipe.of(self.recipe)
        object.__setattr__(self, "recipe", recipe)
        if recipe.kind is not None or recipe.on_hub is not None:
            raise InvalidParameter(
                "a refresh keeps the kinds and the hub guard of a collection: leave out kind and on_hub; "
                "`hubs --on-hub` changes the guard, and a migration of the source the kinds"
            )
        Measure.of(self.measure)
        expect_judgements(self.judgements)
        expect_client_ttl(self.client_ttl)
        is_whole = isinstance(self.keep_former, numbers.Integral)
        if isinstance(self.keep_former, bool) or not is_whole:
            raise InvalidParameter(f"keep_former must be a whole number, not {self.keep_former!r}")
        if self.keep_former < 0:
            raise InvalidParameter(f"keep_former is from 0 up, got {self.keep_former}")
        if isinstance(self.refit, str):
            expect_word("refit", self.refit, Refit)
            return
        is_number = isinstance(self.refit, numbers.Real) and not isinstance(self.refit, bool)
        if not is_number or not 0 < self.refit <= 1:
            raise InvalidParameter(
                f"refit is a share of the rows above 0, up to 1, or one of {', '.join(get_args(Refit))}, "
                f"got {self.refit!r}"
            )

    @classmethod
    def of(cls, options: RefreshOptions | None, changes: Mapping[str, Any]) -> RefreshOptions:
        """Return the options of a call, with other values of the fields in `changes`."""
        if options is None:
            return cls(**changes)
        expect_instance("options", options, cls, "name a recipe by recipe=")
        return replace(options, **changes)

    @property
    def refit_share(self) -> float | None:
        """The share of new or changed rows from which on a refit is due; None if it decides nothing."""
        return None if isinstance(self.refit, str) else self.refit

    @property
    def judging(self) -> Judging:
        """How the bank is judged: `force` goes on after a verdict against it."""
        judging = self.recipe.judging
        if self.force and judging.mode == "require":
            return replace(judging, mode="warn")
        return judging
