"""Collections that are corrected from their first row on. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from pymilvus import CollectionSchema, DataType, FieldSchema, MilvusClient
from pymilvus.milvus_client.index import IndexParams

from milvus_hubness.correction.banks.bank import BankLike
from milvus_hubness.correction.banks.stored import StoredBank
from milvus_hubness.correction.codec.index_hints import measured_on
from milvus_hubness.correction.codec.layout import Layout
from milvus_hubness.correction.codec.parts import BiasSlots
from milvus_hubness.correction.codec.quantisation import with_bias_scale
from milvus_hubness.correction.estimators.nnn import NNN
from milvus_hubness.correction.state import BankReference, CollectionState
from milvus_hubness.errors import InvalidInput, InvalidParameter
from milvus_hubness.jobs.store.generations import Made
from milvus_hubness.jobs.store.protocols import Store
from milvus_hubness.jobs.store.records import TuningRecord, VectorField
from milvus_hubness.milvus.client.messages import QUICK_FORM
from milvus_hubness.milvus.store import schema as milvus_schema

if TYPE_CHECKING:
    from milvus_hubness.jobs.common.recipe import Recipe

    RecipeLike: TypeAlias = "Recipe | BankLike"
else:
    # Pydantic evaluates annotations, and a client without a new collection imports no recipe.
    RecipeLike = Any


@dataclass(frozen=True, eq=False)
class CorrectionConfig:
    """The correction of a vector field of a new collection.

    Raises as Recipe does, and InvalidInput for what a collection without rows cannot have.
    """

    recipe: RecipeLike
    """Which biases it gets, or a bank alone. By default they are those of NNN(16): an empty collection
    needs a method without a gallery, and a later refresh can use any other. The bank is judged on the
    items of a target bank; without them the first refresh of a thousand rows judges it. A prior, which
    has to be a field, counts from the first refresh on, and the hub guard from the first one of 200
    rows, or at once with 200 items in the target bank.
    """
    anns_field: str | None = None
    """By default the only vector field."""
    bank_collection: str | None = None
    """By default <collection>__bank, and <collection>__bank_<field> for a field after the first."""
    strength: float = 1.0
    """w of searches that name none."""

    def __post_init__(self) -> None:
        # An import that a client without a new collection does not pay for.
        from milvus_hubness.jobs.common.recipe import Recipe
        from milvus_hubness.jobs.common.samples import VECTORS

        recipe = Recipe.of(self.recipe)
        object.__setattr__(self, "recipe", recipe)
        if recipe.bank is None:
            raise InvalidInput("a new collection needs reference queries: pass a bank")
        for name in VECTORS:
            if isinstance(text := getattr(recipe, name), str):
                raise InvalidInput(
                    f"{name}={text!r} is read by jobs only, not by create_collection: pass the vectors, "
                    "or the name of their file"
                )
        if recipe.kind is not None or recipe.gate:
            raise InvalidInput(
                "kinds and a gate are chosen on the rows, and a new collection has none: leave kind and "
                "gate out, and migrate it once it has rows"
            )
        if not isinstance(recipe.prior, str | None):
            raise InvalidInput(
                f"the prior of a new collection is the name of a field, not {recipe.prior!r}: a "
                "refresh takes clicks"
            )
        recipe.prior_request.expect_source()
        if recipe.prior_request.is_demand:
            raise InvalidInput(
                "the demand of a bank is shared among the rows, and a new collection has none: "
                "refresh with --prior bank once it has rows"
            )


def schema_and_indexes(
    arguments: Mapping[str, Any],
) -> tuple[CollectionSchema, IndexParams, dict[str, Any]]:
    """Return the schema, the indexes and the further arguments of MilvusClient.create_collection.

    For the quick form, the schema and the index are those
    that pymilvus would create. Raises InvalidParameter.
    """
    further = dict(arguments)
    quick = {name: further.pop(name) for name in QUICK_FORM}
    schema = further.pop("schema")
    index = further.pop("index_params")
    if schema is not None:
        return schema, index or IndexParams(), further

    key_types = {"int": DataType.INT64, "string": DataType.VARCHAR, "str": DataType.VARCHAR}
    key_type = quick["id_type"]
    key_type = key_types.get(key_type) if isinstance(key_type, str) else key_type
    if key_type not in (DataType.INT64, DataType.VARCHAR):
        raise InvalidParameter(f'id_type is "int" or "string", got {quick["id_type"]!r}')
    if quick["dimension"] is None:
        raise InvalidParameter("a new collection needs a dimension or a schema: pass one of them")

    schema = MilvusClient.create_schema(
        auto_id=quick["auto_id"], enable_dynamic_field=further.pop("enable_dynamic_field", True)
    )
    length = further.pop("max_length", None)
    limits = {"max_length": length} if length and key_type == DataType.VARCHAR else {}
    schema.add_field(quick["primary_field_name"], key_type, is_primary=True, **limits)
    schema.add_field(quick["vector_field_name"], DataType.FLOAT_VECTOR, dim=quick["dimension"])
    schema.verify()

    index = IndexParams()
    index.add_index(
        quick["vector_field_name"], index_type="AUTOINDEX", metric_type=quick["metric_type"]
    )
    return schema, index, further


@dataclass(frozen=True, eq=False)
class NewField:
    """A corrected field of a collection to be created."""

    name: str
    save_bank: Callable[[Store], tuple[BankReference, Made]]
    """Saves its bank in a store."""
    state: Callable[[BankReference], CollectionState]
    """Returns its state, given its saved bank."""
    verdict: TuningRecord | None
    """The verdict on its bank; None without items to judge it on."""


def new_fields(
    collection: str,
    hubness: CorrectionConfig | Sequence[CorrectionConfig],
    schema: CollectionSchema,
    index: IndexParams,
) -> list[NewField]:
    """Return the fields to correct in a collection of this schema, each with its fitted bank.

    Raises InvalidInput if they cannot be corrected, CorrectionNotRecommended.
    """
    if obstacles := milvus_schema.kind_obstacles(schema.to_dict()):
        raise InvalidInput(f"collection {collection!r} cannot be corrected: {'; '.join(obstacles)}")
    if schema.struct_fields:
        raise InvalidInput(
            f"collection {collection!r} cannot be created with hubness: field "
            f"{schema.struct_fields[0].name!r} has arrays of structs: create it without, insert "
            "rows, and correct it by `milvus-hubness enable`"
        )

    vector_fields = {
        field.name: field for field in schema.fields if field.dtype in milvus_schema.DTYPES
    }
    described = milvus_schema.vector_fields(schema.to_dict(), [])
    indexes = {params.field_name: params.get_index_configs() for params in index}
    fields: list[NewField] = []
    for config in _configs(hubness):
        name = config.anns_field or (next(iter(vector_fields)) if len(vector_fields) == 1 else None)
        if name is None or name not in vector_fields:
            names = ", ".join(vector_fields) or "none"
            raise InvalidInput(
                f"collection {collection!r} needs an anns_field: its vector fields are {names}"
            )

        if any(field.name == name for field in fields):
            raise InvalidInput(
                f"field {name!r} is named twice: pass one CorrectionConfig for each field"
            )

        if not indexes.get(name, {}).get("metric_type"):
            raise InvalidInput(
                f"the metric of field {name!r} is unknown: give its index in index_params"
            )

        vector = replace(described[name], metric=str(indexes[name]["metric_type"]))
        if obstacles := vector.obstacles:
            raise InvalidInput(
                f"collection {collection!r} cannot be corrected: {'; '.join(obstacles)}"
            )

        prior = cast("Recipe", config.recipe).prior
        if isinstance(prior, str):
            description = schema.to_dict()
            milvus_schema.expect_values(description, prior, collection, are_numbers=True)

        suffix = f"_{name}" if fields else ""
        fields.append(_new_field(collection, config, vector_fields[name], indexes[name], suffix))

    return fields


def _configs(hubness: Any) -> list[CorrectionConfig]:
    """Return the configurations as a list. Raises InvalidParameter for other values."""
    configs = list(hubness) if isinstance(hubness, list | tuple) else [hubness]
    for config in configs:
        if not isinstance(config, CorrectionConfig):
            raise InvalidParameter(
                f"hubness takes a CorrectionConfig or a list of them, not {type(config).__name__}: "
                "pass CorrectionConfig(bank), or CorrectionConfig(recipe)"
            )
    return configs


def _new_field(
    collection: str,
    config: CorrectionConfig,
    field: FieldSchema,
    index: Mapping[str, Any],
    suffix: str,
) -> NewField:
    """Fit the bank of a field.

    The mean bias is 0 until the first full refresh, as the collection has no rows yet. Under L2 the
    layout's constants, which stay, are measured on the target bank's items, or else on the queries,
    since vectors near each other have similar lengths.
    """
    # Imports that a client without a new collection does not pay for.
    from milvus_hubness.correction.fitted import Correction, grouped, initial_state
    from milvus_hubness.jobs.common.choice import Choice, choice_of
    from milvus_hubness.jobs.common.gallery import FitRows
    from milvus_hubness.jobs.common.judging import judged
    from milvus_hubness.jobs.common.priors import chosen_prior
    from milvus_hubness.jobs.common.recipe import Recipe

    recipe = Recipe.of(config.recipe)
    bank = recipe.required_bank(collection)
    targets = recipe.named_targets
    default = Choice(NNN(16), config.strength)
    estimator = choice_of(recipe, None, default).estimator
    if estimator.needs_gallery:
        raise InvalidInput(
            f"{type(estimator).__name__} is fitted on a gallery, and {collection!r} has no "
            "rows yet: begin with NNN or an estimator with an absolute tau, and refresh once it "
            "has rows"
        )

    dim = int(field.params["dim"])
    dtype = milvus_schema.DTYPES[field.dtype]

    vector = VectorField(
        field.name, dim, str(index["metric_type"]), str(index.get("index_type")), dict(index), dtype
    )
    needs = milvus_schema.column_needs(vector, dim, vector.metric)
    layout = Layout(dim, vector.known_metric, BiasSlots(spread=needs.spread), needs.multiple_of)

    bank.expect_dim(dim, "the field")
    layout = measured_on(
        layout,
        (targets or bank).vectors,
        bank.vectors,
        taken_off=targets is not None,
        **needs.hints,
    )

    verdict = None
    if targets is not None and recipe.judging.mode != "skip":
        verdict = judged(layout, FitRows(targets.vectors), field.name, bank, recipe.judging)
        recipe.judging.require(verdict, collection)
    strength = min(config.strength, choice_of(recipe, verdict, default).strength)

    # Without target items, the first refresh that reads rows looks for near copies.
    if targets is not None:
        bank = grouped(layout, bank, targets.vectors)
    stored = StoredBank(bank, np.empty((len(bank), 0), np.float32), targets)
    correction = Correction.restore(layout, estimator, stored)
    if layout.slots.spread > 1:
        rows = (targets or bank).vectors
        rows = rows[~layout.invalid(rows)]
        layout = with_bias_scale(layout, rows, correction.centred(rows), strength)

    state = partial(
        initial_state,
        layout,
        estimator,
        field=field.name,
        suffix=suffix,
        dtype=dtype,
        source=collection,
        strength=strength,
        prior=chosen_prior(recipe.prior_request, verdict).prior,
        evidence=correction.measured(targets.vectors).evidence if targets is not None else None,
        on_hub=recipe.on_hub or "off",
    )
    bank_collection = config.bank_collection or f"{collection}__bank{suffix}"
    return NewField(
        field.name,
        lambda store: store.save_bank(bank_collection, stored, layout.metric),
        state,
        verdict,
    )


def served_indexes(index: IndexParams, states: Mapping[str, CollectionState]) -> IndexParams:
    """Return the indexes that the server builds: corrected fields have the metric IP.

    Raises InvalidParameter if the metric of a field differs from the metric of its correction.
    """
    served = IndexParams()
    for params in index:
        configs = dict(params.get_index_configs())
        index_type = configs.pop("index_type", params.index_type)
        state = states.get(params.field_name)
        requested = str(configs.get("metric_type") or "") or None
        if state is not None and (metric := state.index_metric(requested)):
            configs["metric_type"] = metric

        served.add_index(
            params.field_name, index_type=index_type, index_name=params.index_name, **configs
        )

    return served
