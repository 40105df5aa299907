"""A second vector field of a Milvus collection, for augmented vectors; the first field stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pymilvus import DataType, MilvusClient

from milvus_hubness.banks.generations import Batch
from milvus_hubness.codec.base import BIAS_FIELD, EPOCH_FIELD
from milvus_hubness.codec.second_vector import SECOND_VECTOR_FIELD
from milvus_hubness.errors import CannotMigrate
from milvus_hubness.state import CollectionState
from milvus_hubness.stores import milvus_schema
from milvus_hubness.stores.milvus_requests import MilvusRequests
from milvus_hubness.stores.milvus_server import supports, translated
from milvus_hubness.stores.records import CollectionInfo

NEEDED_VERSION = "2.6.18"
_SCALARS = {BIAS_FIELD: DataType.FLOAT, EPOCH_FIELD: DataType.INT64}


class MilvusSecondField(MilvusRequests):
    """The store's methods for a second vector field."""

    def second_vector_field(
        self, source: CollectionInfo, field: str, suffix: str, width: int
    ) -> Literal["there", "can be added"]:
        if obstacles := self._obstacles(source, field, suffix, width):
            raise CannotMigrate(
                f"{source.name!r} cannot hold corrected vectors in a second field: {'; '.join(obstacles)}"
            )
        names = {each["name"] for each in source.schema["fields"]}
        return "there" if names.issuperset(_wanted(source, field, suffix)) else "can be added"

    def second_vector_remarks(self, source: CollectionInfo, suffix: str) -> list[str]:
        remarks = ["clients other than HubnessClient must name the field in their searches, now that there are two"]
        ours = {name + suffix for name in (SECOND_VECTOR_FIELD, *_SCALARS)}
        bare = [
            each["name"]
            for each in source.schema["fields"]
            if each["name"] in ours and not each.get("nullable") and each.get("default_value") is None
        ]
        if bare:
            remarks.append(f"neither nullable nor with a default, so their inserts must set: {', '.join(bare)}")
        else:
            remarks.append("rows that they insert are found by corrected searches after the next refresh")
        if not supports(self._version, "partial updates"):
            remarks.append(
                "this server replaces whole rows: one that changes in the instant in which its second field "
                "is filled may come back as it was"
            )
        return remarks

    def add_second_vector(self, source: CollectionInfo, field: str, suffix: str, width: int) -> None:
        names = {each["name"] for each in source.schema["fields"]}
        with translated(source.name):
            for name, kind in _wanted(source, field, suffix).items():
                if name not in names:
                    form: dict[str, Any] = {"dim": width} if name == SECOND_VECTOR_FIELD + suffix else {}
                    if not form:
                        form = {"default_value": milvus_schema.NO_BIAS[kind]}
                    self.client.add_collection_field(source.name, name, kind, nullable=True, **form)

    def load_second_vector(self, source: CollectionInfo, state: CollectionState) -> None:
        of, name = source.vector_fields[state.field], state.searched_field
        with translated(source.name):
            if not self.client.list_indexes(source.name, name):
                index = MilvusClient.prepare_index_params(
                    name, index_type=of.index_type, index_name=name, metric_type="IP", params=of.index_params
                )
                self.client.create_index(source.name, index)
            if self.is_lite:
                self.client.load_collection(source.name)
            else:
                self.client.refresh_load(source.name)

    def drop_second_vector(self, collection: str, state: CollectionState) -> bool:
        if not supports(self._version, "dropped fields"):
            return False
        with translated(collection):
            for name in state.codec.hidden_fields:
                self.client.drop_collection_field(collection, name)
        return True

    def update(
        self, collection: str, batch: Batch, field: str, changed: Sequence[str], *, partition: str | None
    ) -> None:
        if not supports(self._version, "partial updates"):
            self.upsert(collection, batch, field, partition=partition)
            return
        with translated(collection):
            key_field = self._key_field(collection)
            rows = [{name: row[name] for name in (key_field, *changed)} for row in batch.rows]
        self._upsert(collection, rows, partition, partial_update=True)

    def _obstacles(self, source: CollectionInfo, field: str, suffix: str, width: int) -> list[str]:
        fields = {each["name"]: each for each in source.schema["fields"]}
        hidden = _wanted(source, field, suffix)
        reasons = milvus_schema.kind_obstacles(source.schema) + [
            f"field {name!r} is {DataType(fields[name]['type']).name}, not {kind.name}"
            for name, kind in hidden.items()
            if name in fields and fields[name]["type"] != kind
        ]
        second = SECOND_VECTOR_FIELD + suffix
        stored = int(fields[second]["params"].get("dim", 0)) if second in fields else width
        if stored != width and not reasons:
            reasons.append(f"field {second!r} has {stored} dimensions, the augmented form has {width}")
        missing = [name for name in hidden if name not in fields]
        if missing and not supports(self._version, "new vector fields"):
            kinds = [f"{name} ({kind.name})" for name, kind in hidden.items()]
            reasons.append(
                f"it lacks {', '.join(missing)}, and Milvus adds vector fields to a collection from "
                f"{NEEDED_VERSION} on, this is {self._version} (where several vector fields are allowed, "
                f"make the collection with {', '.join(kinds)}, the first of {width} dimensions)"
            )
        if fields[field].get("nullable"):
            reasons.append(f"field {field!r} is nullable: rows without a vector cannot carry a bias")
        if milvus_schema.key_field(source.schema).get("auto_id") and not self.is_lite:
            reasons.append("auto_id: this server gives every written row a new key")
        return reasons


def _wanted(source: CollectionInfo, field: str, suffix: str) -> dict[str, DataType]:
    """Return the names and types of the hidden fields: the augmented vector, its bias and its epoch."""
    [described] = [each for each in source.schema["fields"] if each["name"] == field]
    kinds = {SECOND_VECTOR_FIELD: DataType(described["type"]), **_SCALARS}
    return {name + suffix: kind for name, kind in kinds.items()}
