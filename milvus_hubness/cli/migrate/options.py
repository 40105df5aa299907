"""The options that the migrate commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milvus_hubness.cli import options
from milvus_hubness.errors import InvalidParameter

if TYPE_CHECKING:
    from milvus_hubness.jobs.common.plan import Plan
    from milvus_hubness.jobs.migration.ledger import Migration
    from milvus_hubness.jobs.migration.plan import PlannedCopy
    from milvus_hubness.jobs.store.protocols import Store

Name = Annotated[
    str, typer.Argument(help="Source of the migration, its copy, or an alias of either.")
]
Source = Annotated[str, typer.Argument(help="Collection to correct.")]
Target = Annotated[str | None, "Copy, required if the source has several copies."]
AsEvents = Annotated[
    bool, typer.Option("--json", help="Print each event, and last the result, as a line of JSON.")
]


@dataclass(frozen=True)
class Switching:
    """The options that select the name that moves to the copy."""

    alias: Annotated[
        str | None, "Alias that the application reads: it is moved to the copy or created."
    ] = None
    rename: Annotated[
        bool,
        "Rename the source to SOURCE__before_hubness and make its name an alias of the copy, for "
        "applications that read the source by its own name.",
    ] = False

    def __post_init__(self) -> None:
        # Typer makes this record while it reads the command line, so it is an error of usage.
        if self.alias == "":
            raise typer.BadParameter("--alias is empty: pass the name to move, or leave it out")
        if self.alias and self.rename:
            raise typer.BadParameter("give either --alias or --rename: a cutover moves one name")


@dataclass(frozen=True)
class Writers:
    """The options about clients that write during the migration."""

    no_writers: Annotated[bool, "Nobody writes to the collection: wait for no client."] = False


@dataclass(frozen=True)
class Planning(options.CorrectionOptions):
    """The options that define the copy."""

    target: Annotated[str | None, "Name of the copy. [default: SOURCE_hubness]"] = None
    kind: options.Kind = None
    index_type: Annotated[
        str | None, "Index type of the copy, such as HNSW. [default: the source's]"
    ] = None
    index_param: Annotated[
        list[str] | None,
        "NAME=VALUE, a parameter of the copy's index, such as nlist=512; repeatable. [default: the "
        "source's]",
    ] = None
    restart: Annotated[bool, "Drop the leftovers of an unfinished migration and start again."] = (
        False
    )

    def plan(
        self,
        store: Store,
        source: str,
        switching: Switching,
        writers: Writers,
        *,
        measure: bool = False,
    ) -> Plan[PlannedCopy]:
        """Return the plan of these options. Raises typer.BadParameter if they name no bank."""
        from milvus_hubness.jobs.common.lease_records import default_client_ttl
        from milvus_hubness.jobs.migration.plan import Copy
        from milvus_hubness.jobs.plan import plan_correction

        self.expect(store, source, self.field)
        return plan_correction(
            store,
            source,
            self.recipe_for(store, source, kind=self.kind),
            Copy(
                target=self.target,
                alias=switching.alias,
                rename=switching.rename,
                measure=measure,
                index_type=self.index_type,
                index_params=options.pairs_of(self.index_param, "--index-param"),
                restart=self.restart,
                # Without writers there is no client to wait for.
                client_ttl=0.0 if writers.no_writers else default_client_ttl(),
            ),
            field=self.field,
            bank_collection=self.bank_name,
        )

    def validate_resumed(self, store: Store, migration: Migration) -> None:
        """Check that no option differs from those of a resumed migration.

        The name that moves is not one of these: `resume` checks it. Raises InvalidParameter.
        """
        from milvus_hubness.correction.estimators import to_dict
        from milvus_hubness.jobs.common.priors import ChosenPrior

        former = migration.arguments
        index = former.get("index") or {}
        recipe = self.recipe_for(store, migration.source, kind=self.kind)
        estimator = recipe.estimator
        # More queries may have been sampled since: the migration goes on with those it began with.
        bank = None if isinstance(recipe.bank, str) else recipe.named_bank
        targets = recipe.named_targets
        prior = ChosenPrior.of(recipe.prior_request).arguments or {}
        former_prior = former.get("prior") or {}
        index_type = self.index_type and self.index_type.upper()

        # Each option as it is now, None if it is not given, and as the migration was started.
        now_and_then = {
            "--field": (self.field, migration.field),
            "--bank-name": (self.bank_name, migration.bank_collection),
            "--gate": (recipe.gate, former.get("gate") or 0),
            # A prior has one source: the other is an empty text, or nothing without a prior.
            "--prior": (prior.get("field") or None, former_prior.get("field") or None),
            "--prior-from": (prior.get("clicks") or None, former_prior.get("clicks") or None),
            "--prior-weight": (recipe.prior_weight, former_prior.get("weight")),
            "--kind": (recipe.kind, former.get("kind")),
            "--on-hub": (recipe.on_hub, former.get("on_hub")),
            "--index-type": (index_type, index.get("index_type")),
            "--method": (estimator and to_dict(estimator), former.get("estimator")),
            "--bank": (bank and bank.fingerprint, former.get("bank")),
            "--target-bank": (targets and targets.fingerprint, former.get("target_bank")),
        }

        params = index.get("index_params", {})
        for name, value in options.pairs_of(self.index_param, "--index-param").items():
            now_and_then[f"--index-param {name}"] = (str(value), str(params.get(name)))

        differing = [
            name for name, (now, then) in now_and_then.items() if now is not None and now != then
        ]
        if differing:
            raise InvalidParameter(
                f"{', '.join(differing)}: the migration of {migration.source!r} to "
                f"{migration.target!r} is {migration.phase!r} and was started with other options: "
                "repeat them, or name another --target"
            )


@dataclass(frozen=True)
class Extent:
    """The options that say how far a run goes, and what it measures on the way."""

    plan: Annotated[bool, "Show what the run would do; write nothing."] = False
    rehearse: Annotated[bool, "Do all but the switch, on real data, and report what it took."] = (
        False
    )
    measure: Annotated[
        bool, "Measure the recall of the index on a sample, and how to regain it."
    ] = False

    def __post_init__(self) -> None:
        if self.plan and self.rehearse:
            raise typer.BadParameter("give either --plan or --rehearse: a plan writes nothing")


@dataclass(frozen=True)
class Pace:
    """The options that limit the pace of the copy."""

    rows_per_second: options.RowsPerSecond = None

    def __post_init__(self) -> None:
        # A plan of a run refuses what the run itself would.
        if self.rows_per_second is not None:
            from milvus_hubness.jobs.common.progress import checked_limit

            checked_limit("rows_per_second", self.rows_per_second)


@dataclass(frozen=True)
class Watching(Writers):
    """The options that report and control a running migration."""

    control: Annotated[
        Path | None,
        'JSON file that controls the run whenever it changes, such as {"paused": true}.',
    ] = None


@dataclass(frozen=True)
class CutoverOptions(Watching):
    """The options of what ends in a cutover."""

    postpone_cutover: Annotated[
        bool, "Follow the source until the file of --control says 'now', then cut over."
    ] = False
