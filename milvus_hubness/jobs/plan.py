"""The beginning of every plan: `plan_correction`."""

from __future__ import annotations

from typing import Any

from milvus_hubness.basics.progress import Progress, silent
from milvus_hubness.basics.texts import field_words
from milvus_hubness.correction.banks.bank import BankLike
from milvus_hubness.correction.state import suffix_for
from milvus_hubness.errors import (
    CannotMigrate,
    CollectionExists,
    DimensionMismatch,
    InvalidParameter,
)
from milvus_hubness.jobs.common.gallery import only_field
from milvus_hubness.jobs.common.plan import Body, Draft, Plan
from milvus_hubness.jobs.common.recipe import Recipe
from milvus_hubness.jobs.migration.plan import Copy
from milvus_hubness.jobs.store.ownership import bank_name
from milvus_hubness.jobs.store.protocols import Store, expect_store, validate_new_names

DEFAULT_BODY = Copy()


def plan_correction(
    store: Store,
    source: str,
    recipe: Recipe | BankLike | str,
    body: Body[Any] = DEFAULT_BODY,
    *,
    field: str | None = None,
    bank_collection: str | None = None,
    progress: Progress = silent,
) -> Plan[Any]:
    """Plan a correction of `source`. Read only.

    recipe: which biases it gets, or a bank alone, with which the choice of tuning on it, else the
    default, applies. body: where they go, a `Copy`, which `migrate` makes, or `Beside` the vectors,
    where `enable` writes them. field: the vector field to correct, by default the only one.
    bank_collection: name of the collection that holds the bank, by default derived from the source's.

    `migrate` and `enable` raise CorrectionNotRecommended before their first write if the verdict on
    the bank is "leave it alone", unless the recipe goes on all the same.

    Raises CollectionNotFound, AlreadyCorrected, EmptyCollection, CannotMigrate, which names every
    obstacle, CollectionExists, DimensionMismatch, BankTooSmall, InvalidParameter, InvalidInput.
    """
    if not isinstance(body, Body):
        raise InvalidParameter(f"body must be a Copy or a Beside, not {body!r}")
    expect_store(store)
    recipe = Recipe.of(recipe).read(store, source, field)
    info = store.info(source)
    if info.is_bank:
        raise CannotMigrate(f"{info.name!r} is a query bank: name the collection of the items")

    field = field or only_field(info)
    draft = Draft(
        source=info,
        field=field,
        suffix=suffix_for(field, info.states.values()),
        bank_collection=bank_collection or bank_name(info.name),
    )
    body.expect_correctable(store, draft, recipe)
    validate_new_names(store, bank_collection)
    bank = recipe.required_bank(info.name)
    bank.expect_rows(draft.vector.multi_vectors, field_words(field))
    bank.expect_dim(draft.vector.dim, "the field")
    _expect_bank_collection(store, draft)
    return body.planned(store, draft, recipe, progress)


def _expect_bank_collection(store: Store, draft: Draft) -> None:
    """Check that the bank of a plan can be stored under its name.

    A job stores it after it has written other things. Raises CollectionExists, DimensionMismatch.
    """
    name = draft.bank_collection
    if not store.exists(name):
        return
    info = store.info(name, counted=False)
    if not info.is_bank:
        raise CollectionExists(
            f"collection {name!r} exists and is not a query bank: choose another name with --bank-name"
        )
    widths = {vector.dim for vector in info.vector_fields.values()}
    if draft.vector.dim not in widths:
        raise DimensionMismatch(
            f"bank {name!r} has vectors of {', '.join(map(str, sorted(widths)))} dimensions, "
            f"{draft.vector.dim} are needed: choose another name with --bank-name"
        )
