"""A Milvus Lite with arrays of structs: what Milvus 2.6.4 and newer answers, for requests as pymilvus encodes them.

Milvus Lite 3.2.2 drops a struct field without an error, and Milvus 2.3.5 has none. This server hands every request
to Milvus Lite but for the struct fields: it takes their columns out of writes, and puts them back into answers. A
search of `chunks[embedding]` is an exact MaxSim in float64. It refuses what a Milvus server refuses: columns of other
dimensions or lengths than the schema says, and queries of another kind than the metric takes.
"""

from __future__ import annotations

import uuid
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from milvus_lite.adapter.grpc.servicer import MilvusServicer
from milvus_lite.db import MilvusLite
from pymilvus import DataType
from pymilvus.client.types import PlaceholderType
from pymilvus.grpc_gen import common_pb2, milvus_pb2, milvus_pb2_grpc, schema_pb2

from milvus_hubness.milvus.proxy.columns import keys_of, put_keys, take_rows

HIDDEN = "structs_of_row"
"""The field of Milvus Lite with the name of a row's structs."""

IS_WRONG = 1100
"""Milvus's code of a wrong parameter."""


class Wrong(Exception):
    """A request that a Milvus server refuses."""


class Structs(MilvusServicer):
    """schemas, indexes: by collection, its struct fields, and the indexes of their sub-fields. rows: by name, the
    column of one row of each struct field."""

    def __init__(self, db: MilvusLite) -> None:
        super().__init__(db)
        self.schemas: dict[str, list[Any]] = {}
        self.indexes: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.searches: list[Any] = []

    def _name(self, request: Any, context: Any) -> str:
        return str(self._get_collection(request, context).name)

    def _structs(self, request: Any, context: Any) -> dict[str, Any]:
        """The struct fields of a request's collection, by name."""
        try:
            name = self._name(request, context)
        except Exception:
            return {}
        return {each.name: each for each in self.schemas.get(name, ())}

    # -- collections -------------------------------------------------------------------------------

    def CreateCollection(self, request: Any, context: Any) -> Any:
        schema = schema_pb2.CollectionSchema.FromString(request.schema)
        structs = list(schema.struct_array_fields)
        if not structs:
            return super().CreateCollection(request, context)
        for struct in structs:
            for sub in struct.fields:
                assert sub.data_type in (DataType.ARRAY, DataType._ARRAY_OF_VECTOR)
                # As a Milvus server names them from then on.
                sub.name = f"{struct.name}[{sub.name}]"
        del schema.struct_array_fields[:]
        length = [common_pb2.KeyValuePair(key="max_length", value="64")]
        schema.fields.add(name=HIDDEN, data_type=DataType.VARCHAR, type_params=length)
        changed = milvus_pb2.CreateCollectionRequest()
        changed.CopyFrom(request)
        changed.schema = schema.SerializeToString()
        status = super().CreateCollection(changed, context)
        if not status.code:
            self.schemas[request.collection_name] = structs
            self.indexes[request.collection_name] = {}
        return status

    def DropCollection(self, request: Any, context: Any) -> Any:
        self.schemas.pop(request.collection_name, None)
        self.indexes.pop(request.collection_name, None)
        return super().DropCollection(request, context)

    def RenameCollection(self, request: Any, context: Any) -> Any:
        status = super().RenameCollection(request, context)
        for held in (self.schemas, self.indexes):
            if not status.code and request.oldName in held:
                held[request.newName] = held.pop(request.oldName)
        return status

    def DescribeCollection(self, request: Any, context: Any) -> Any:
        answer = super().DescribeCollection(request, context)
        fields = [field for field in answer.schema.fields if field.name != HIDDEN]
        if len(fields) < len(answer.schema.fields):
            answer.schema.ClearField("fields")
            answer.schema.fields.extend(fields)
        answer.schema.struct_array_fields.extend(self._structs(request, context).values())
        return answer

    # -- indexes -----------------------------------------------------------------------------------

    def CreateIndex(self, request: Any, context: Any) -> Any:
        subs = {
            sub.name: sub
            for struct in self._structs(request, context).values()
            for sub in struct.fields
        }
        if request.field_name not in subs:
            return super().CreateIndex(request, context)
        params = {pair.key: pair.value for pair in request.extra_params}
        if not params.get("metric_type", "").startswith("MAX_SIM"):
            return _refused(f"metric {params.get('metric_type')} of {request.field_name}")
        if subs[request.field_name].data_type != DataType._ARRAY_OF_VECTOR:
            return _refused(f"{request.field_name} holds no vectors")
        self.indexes[self._name(request, context)][request.field_name] = (
            milvus_pb2.IndexDescription(
                index_name=request.index_name or request.field_name,
                field_name=request.field_name,
                params=request.extra_params,
                state=common_pb2.IndexState.Finished,
            )
        )
        return common_pb2.Status()

    def DescribeIndex(self, request: Any, context: Any) -> Any:
        answer = super().DescribeIndex(request, context)
        structs = self._structs(request, context)
        held = self.indexes[self._name(request, context)] if structs else {}
        # pymilvus names an index of which it does not know the field.
        named = request.field_name or request.index_name
        chosen = [
            index for index in held.values() if named in ("", index.field_name, index.index_name)
        ]
        if not chosen:
            return answer
        others = [] if named or answer.status.code else list(answer.index_descriptions)
        return milvus_pb2.DescribeIndexResponse(index_descriptions=[*others, *chosen])

    # -- rows --------------------------------------------------------------------------------------

    def Insert(self, request: Any, context: Any) -> Any:
        return self._write(super().Insert, request, context)

    def Upsert(self, request: Any, context: Any) -> Any:
        return self._write(super().Upsert, request, context)

    def _write(self, write: Any, request: Any, context: Any) -> Any:
        structs = self._structs(request, context)
        if not structs:
            return write(request, context)
        try:
            columns = [each for each in request.fields_data if each.field_name in structs]
            for column in columns:
                _expect_fitting(column, structs[column.field_name], request.num_rows)
            others = [each for each in request.fields_data if each.field_name not in structs]
            lacking = structs.keys() - {each.field_name for each in columns}
            if lacking and not getattr(request, "partial_update", False):
                raise Wrong(f"no columns of {sorted(lacking)}")
        except Wrong as error:
            return milvus_pb2.MutationResult(status=_refused(str(error)))
        changed = type(request)()
        changed.CopyFrom(request)
        changed.ClearField("fields_data")
        changed.fields_data.extend(others)
        if columns:
            names = [self._held(columns, row) for row in range(request.num_rows)]
            hidden = changed.fields_data.add(field_name=HIDDEN, type=DataType.VARCHAR)
            hidden.scalars.string_data.data.extend(names)
        return write(changed, context)

    def _held(self, columns: list[Any], row: int) -> str:
        name = uuid.uuid4().hex
        self.rows[name] = {}
        for column in columns:
            one = schema_pb2.FieldData()
            one.CopyFrom(column)
            take_rows(one, [row])
            self.rows[name][column.field_name] = one
        return name

    def Query(self, request: Any, context: Any) -> Any:
        return self._read(super().Query, request, context, lambda answer: answer)

    def Search(self, request: Any, context: Any) -> Any:
        self.searches.append(request)
        field = {pair.key: pair.value for pair in request.search_params}.get("anns_field", "")
        if "[" not in field:
            return self._read(super().Search, request, context, lambda answer: answer.results)
        try:
            return self._max_sim(request, context, field)
        except Wrong as error:
            return milvus_pb2.SearchResults(status=_refused(str(error)))

    def HybridSearch(self, request: Any, context: Any) -> Any:
        return self._read(super().HybridSearch, request, context, lambda answer: answer.results)

    def _read(self, read: Any, request: Any, context: Any, columns_of: Any) -> Any:
        structs = self._structs(request, context)
        if not structs:
            return read(request, context)
        named = list(request.output_fields)
        shown = list(structs) if "*" in named else [name for name in named if name in structs]
        changed = type(request)()
        changed.CopyFrom(request)
        changed.output_fields[:] = [name for name in named if name not in structs]
        if shown:
            changed.output_fields.append(HIDDEN)
        answer = read(changed, context)
        if answer.status.code:
            return answer
        columns = columns_of(answer).fields_data
        kept = [column for column in columns if column.field_name != HIDDEN]
        names = [
            name
            for column in columns
            if column.field_name == HIDDEN
            for name in column.scalars.string_data.data
        ]
        filled = [self._column(structs[struct], names) for struct in shown]
        del columns[:]
        columns.extend([*kept, *filled])
        return answer

    def _column(self, struct: Any, names: list[str]) -> Any:
        """The column of a struct field, of these rows."""
        column = schema_pb2.FieldData(field_name=struct.name, type=DataType._ARRAY_OF_STRUCT)
        for sub in struct.fields:
            filled = column.struct_arrays.fields.add(field_name=sub.name, type=sub.data_type)
            if sub.data_type == DataType.ARRAY:
                filled.scalars.array_data.element_type = sub.element_type
            else:
                filled.vectors.vector_array.element_type = sub.element_type
                filled.vectors.vector_array.dim = _dim(sub)
                filled.vectors.dim = _dim(sub)
        for name in names:
            one = self.rows[name][struct.name]
            by_name = {sub.field_name: sub for sub in one.struct_arrays.fields}
            for filled in column.struct_arrays.fields:
                sub = by_name[filled.field_name.split("[")[1][:-1]]
                valid = list(sub.valid_data)
                filled.valid_data.extend(valid)
                if filled.type == DataType.ARRAY:
                    cells = sub.scalars.array_data.data or [schema_pb2.ScalarField()]
                    filled.scalars.array_data.data.extend(cells)
                else:
                    cells = sub.vectors.vector_array.data or [schema_pb2.VectorField()]
                    filled.vectors.vector_array.data.extend(cells)
        return column

    # -- searches ----------------------------------------------------------------------------------

    def _max_sim(self, request: Any, context: Any, field: str) -> Any:
        struct, sub = field[:-1].split("[")
        described = self._structs(request, context)[struct]
        width = next(_dim(each) for each in described.fields if each.name == field)
        index = self.indexes[self._name(request, context)].get(field)
        if index is None:
            raise Wrong(f"no index on {field}")
        metric = {pair.key: pair.value for pair in index.params}["metric_type"]
        params = {pair.key: pair.value for pair in request.search_params}
        if params.get("metric_type") not in (None, "", metric):
            raise Wrong(f"metric type not match: expected={metric}, {params['metric_type']}")
        [placeholder] = common_pb2.PlaceholderGroup.FromString(
            request.placeholder_group
        ).placeholders
        if placeholder.type != PlaceholderType.EmbListFloatVector:
            raise Wrong(
                f"{metric} takes lists of embeddings, not placeholders of {placeholder.type}"
            )

        asked = milvus_pb2.QueryRequest(
            collection_name=request.collection_name,
            expr=request.dsl,
            partition_names=request.partition_names,
            db_name=request.db_name,
            output_fields=list({HIDDEN, *request.output_fields} - {struct}),
        )
        rows = self.Query(asked, context)
        if rows.status.code:
            return milvus_pb2.SearchResults(status=rows.status)
        columns = {column.field_name: column for column in rows.fields_data}
        names = self._names(request, context)
        key_column = columns[rows.primary_field_name]
        keys = list(key_column.scalars.string_data.data or key_column.scalars.long_data.data)
        names = [names[key] for key in keys]
        tokens = [self._tokens(name, struct, sub, width) for name in names]
        answer = milvus_pb2.SearchResults(collection_name=request.collection_name)
        results = answer.results
        results.primary_field_name = rows.primary_field_name
        limit, offset = int(params["topk"]), int(params.get("offset", 0))
        chosen: list[int] = []
        for value in placeholder.values:
            numbers = np.frombuffer(value, np.float32)
            if len(numbers) % width or not len(numbers):
                raise Wrong(f"a query of {len(numbers)} numbers for vectors of {width}")
            query = numbers.reshape(-1, width).astype(float)
            scores = {
                row: _score(query, each, metric) for row, each in enumerate(tokens) if len(each)
            }
            best = sorted(scores, key=lambda row: -scores[row])[offset : offset + limit]
            results.topks.append(len(best))
            results.scores.extend(scores[row] for row in best)
            chosen += best
        results.num_queries, results.top_k = len(placeholder.values), limit
        put_keys(results.ids, [keys[row] for row in chosen])
        if struct in request.output_fields or "*" in request.output_fields:
            columns[struct] = self._column(described, names)
        for name, column in columns.items():
            named = name in request.output_fields or "*" in request.output_fields
            if named or name not in (HIDDEN, rows.primary_field_name):
                take_rows(column, chosen)
                results.fields_data.append(column)
        results.output_fields.extend(request.output_fields)
        assert keys_of(results.ids) == [keys[row] for row in chosen]
        return answer

    def _names(self, request: Any, context: Any) -> dict[Any, str]:
        """By key, the names of the rows' structs."""
        asked = milvus_pb2.QueryRequest(
            collection_name=request.collection_name, db_name=request.db_name, output_fields=[HIDDEN]
        )
        answer = super().Query(asked, context)
        columns = {column.field_name: column for column in answer.fields_data}
        key_column = columns[answer.primary_field_name]
        keys = key_column.scalars.string_data.data or key_column.scalars.long_data.data
        return dict(zip(keys, columns[HIDDEN].scalars.string_data.data, strict=True))

    def _tokens(self, name: str, struct: str, sub: str, width: int) -> Any:
        fields = {each.field_name: each for each in self.rows[name][struct].struct_arrays.fields}
        cells = fields[sub].vectors.vector_array.data
        numbers = [np.array(cell.float_vector.data, float) for cell in cells]
        return np.concatenate([*numbers, np.empty(0)]).reshape(-1, width)


def _score(query: Any, tokens: Any, metric: str) -> float:
    if metric == "MAX_SIM_COSINE":
        query = query / np.linalg.norm(query, axis=1, keepdims=True)
        tokens = tokens / np.linalg.norm(tokens, axis=1, keepdims=True)
    elif metric != "MAX_SIM_IP":
        raise Wrong(f"{metric} is not modelled")
    return float((query @ tokens.T).max(axis=1).sum())


def _dim(sub: Any) -> int:
    return next((int(pair.value) for pair in sub.type_params if pair.key == "dim"), 0)


def _refused(reason: str) -> Any:
    return common_pb2.Status(code=IS_WRONG, reason=reason)


def _expect_fitting(column: Any, struct: Any, rows: int) -> None:
    """Raise Wrong unless the column of a struct field has what its schema says, in each row."""
    if column.type != DataType._ARRAY_OF_STRUCT:
        raise Wrong(f"{column.field_name} is of type {column.type}")
    described = {sub.name.split("[")[1][:-1]: sub for sub in struct.fields}
    if {sub.field_name for sub in column.struct_arrays.fields} != described.keys():
        raise Wrong(f"{column.field_name} has other sub-fields than {sorted(described)}")
    counts = []
    for sub in column.struct_arrays.fields:
        schema = described[sub.field_name]
        capacity = next(int(p.value) for p in schema.type_params if p.key == "max_capacity")
        if sub.type == DataType.ARRAY:
            cells = sub.scalars.array_data.data
            counts.append([len(getattr(cell, cell.WhichOneof("data")).data) for cell in cells])
        else:
            array = sub.vectors.vector_array
            width = _dim(schema)
            if any(cell.dim != width for cell in array.data):
                raise Wrong(f"{schema.name} takes vectors of {width}")
            counts.append([_vectors_in(cell, schema.element_type, width) for cell in array.data])
        valid = list(sub.valid_data)
        if len(counts[-1]) != (sum(valid) if valid else rows):
            raise Wrong(f"{schema.name} has {len(counts[-1])} cells for {rows} rows")
        if max(counts[-1], default=0) > capacity:
            raise Wrong(f"{schema.name} holds at most {capacity}")
    if any(each != counts[0] for each in counts):
        raise Wrong(f"the sub-fields of {column.field_name} have different lengths")


def _vectors_in(cell: Any, element_type: int, width: int) -> int:
    sizes = {
        DataType.FLOAT_VECTOR: (lambda: len(cell.float_vector.data), width),
        DataType.FLOAT16_VECTOR: (lambda: len(cell.float16_vector), 2 * width),
        DataType.BFLOAT16_VECTOR: (lambda: len(cell.bfloat16_vector), 2 * width),
        DataType.INT8_VECTOR: (lambda: len(cell.int8_vector), width),
        DataType.BINARY_VECTOR: (lambda: len(cell.binary_vector), width // 8),
    }
    measure, each = sizes[element_type]
    count, rest = divmod(measure(), each)
    if rest:
        raise Wrong(f"a cell of {measure()} for vectors of {each}")
    return count


class StructServer:
    """A server of `Structs` in this process, over a folder."""

    def __init__(self, folder: Path) -> None:
        self._db = MilvusLite(str(folder / "structs.db"))
        self.structs = Structs(self._db)
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        milvus_pb2_grpc.add_MilvusServiceServicer_to_server(self.structs, self._server)
        self.uri = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()
        self._db.close()
