"""HubnessClient: a MilvusClient to which corrected collections look as if they had never been changed."""

from __future__ import annotations

import threading
import time
from typing import Any

from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException

from milvus_hubness.client.rewrite import Rewrite
from milvus_hubness.correction import Correction
from milvus_hubness.errors import CollectionNotFound, EmptyBank, InvalidInput, UnsupportedOperation
from milvus_hubness.estimators import from_dict
from milvus_hubness.layout import Floats
from milvus_hubness.rerank import GloballyCorrected
from milvus_hubness.state import CollectionState, Profile, read_state
from milvus_hubness.stores.base import StoredBank
from milvus_hubness.stores.milvus import MilvusStore
from milvus_hubness.stores.milvus_rpc import COLLECTION_NOT_FOUND

DEFAULT_STATE_TTL = 5.0


class HubnessClient(MilvusClient):
    """Use it wherever a MilvusClient is used. Ordinary collections are passed through untouched.

    On corrected ones, insert, upsert, search, query, get, delete, describe_collection and describe_index
    speak the original dimension and metric. Scores are s(q, r) − w·(b(r) − c) in the user's metric;
    c, the centre kept in the state, moves no ranking and keeps scores on the scale the application knows.

    strength: w of every search that names none; None takes each collection's own (1.0 unless changed).
    state_ttl: seconds for which what a collection says of its biases is believed without asking again; keep
    it below the time between two refreshes.
    """

    def __init__(
        self,
        uri: str = "http://localhost:19530",
        user: str = "",
        password: str = "",
        db_name: str = "",
        token: str = "",
        timeout: float | None = None,
        *,
        strength: float | None = None,
        state_ttl: float = DEFAULT_STATE_TTL,
        **kwargs: Any,
    ) -> None:
        super().__init__(uri, user, password, db_name, token, timeout, **kwargs)
        self._plain = MilvusClient(uri, user, password, db_name, token, timeout, **kwargs)
        self._strength = strength
        self._state_ttl = state_ttl
        self._states: dict[str, tuple[float, CollectionState | None]] = {}
        self._banks: dict[str, tuple[Profile, StoredBank]] = {}
        self._corrections: dict[str, tuple[StoredBank, Correction]] = {}
        self._lock = threading.Lock()

    # -- rows in --------------------------------------------------------------------------------------

    def insert(
        self,
        collection_name: str,
        data: dict[str, Any] | list[dict[str, Any]],
        timeout: float | None = None,
        partition_name: str | None = "",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As MilvusClient.insert; each new row gets its bias from the bank.

        Raises DimensionMismatch, NonFiniteVectors and, under COSINE, ZeroVectors, each naming the rows.
        """
        rows = self._rows_in(collection_name, data, timeout)
        done: dict[str, Any] = super().insert(collection_name, rows, timeout, partition_name, **kwargs)
        return done

    def upsert(
        self,
        collection_name: str,
        data: dict[str, Any] | list[dict[str, Any]],
        timeout: float | None = None,
        partition_name: str | None = "",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As MilvusClient.upsert; rows that bring a vector get its bias. A partial update without one keeps
        the vector and the bias as they are. Raises as `insert` does."""
        rows = self._rows_in(collection_name, data, timeout)
        done: dict[str, Any] = super().upsert(collection_name, rows, timeout, partition_name, **kwargs)
        return done

    def _rows_in(self, collection_name: str, data: Any, timeout: float | None) -> Any:
        rows = [data] if isinstance(data, dict) else data
        state = self._state(collection_name, timeout)
        if state is None or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            return data
        if not rows or not all(state.field in row for row in rows):
            return data
        rewrite = Rewrite(state)
        vectors = rewrite.vectors_of(rows)
        try:
            biases = self._biases(state, vectors)
        except (EmptyBank, CollectionNotFound):
            # A refresh has just adopted another bank and dropped this one.
            self._states.pop(collection_name, None)
            state = self._state(collection_name, timeout)
            if state is None:
                return data
            rewrite, biases = Rewrite(state), self._biases(state, vectors)
        return rewrite.rows_in(rows, vectors, biases, state.profile.epoch)

    def _biases(self, state: CollectionState, vectors: Floats) -> Floats:
        kept = self._kept(state)
        with self._lock:
            known = self._corrections.get(state.profile.bank.collection)
            if known is None or known[0] is not kept:
                correction = Correction.restore(
                    state.layout,
                    from_dict(state.profile.estimator),
                    kept.queries,
                    kept.potentials,
                    target_bank=kept.targets,
                    centre=state.profile.centre,
                )
                known = (kept, correction)
                self._corrections[state.profile.bank.collection] = known
        return known[1].centred(vectors)

    def _kept(self, state: CollectionState) -> StoredBank:
        """The bank as it was when this profile was first seen."""
        with self._lock:
            known = self._banks.get(state.profile.bank.collection)
            if known is None or known[0] != state.profile:
                known = (state.profile, MilvusStore(self._plain).load_bank(state.profile.bank))
                self._banks[state.profile.bank.collection] = known
        return known[1]

    # -- questions --------------------------------------------------------------------------------------

    def search(
        self,
        collection_name: str,
        data: Any = None,
        filter: str = "",
        limit: int = 10,
        output_fields: list[str] | None = None,
        search_params: dict[str, Any] | None = None,
        timeout: float | None = None,
        partition_names: list[str] | None = None,
        anns_field: str | None = None,
        ranker: Any = None,
        function_chains: Any = None,
        highlighter: Any = None,
        ids: Any = None,
        search_aggregation: Any = None,
        *,
        strength: float | None = None,
        rerank: GloballyCorrected | None = None,
        **kwargs: Any,
    ) -> Any:
        """As MilvusClient.search, ranked by the corrected score.

        strength: w; 1 is the full correction, 0 the raw ranking and the raw scores. rerank: fetch more raw
        candidates and rank those against the bank instead. Both are of no effect on a collection that
        carries no biases. Raises DimensionMismatch, InvalidInput, InvalidParameter.
        """
        options: dict[str, Any] = {
            "timeout": timeout,
            "partition_names": partition_names,
            "anns_field": anns_field,
            "ranker": ranker,
            "function_chains": function_chains,
            "highlighter": highlighter,
            "search_aggregation": search_aggregation,
            **kwargs,
        }
        state = self._state(collection_name, timeout)
        if state is None:
            return super().search(
                collection_name, data, filter, limit, output_fields, search_params, ids=ids, **options
            )
        rewrite = Rewrite(state)
        if not rewrite.is_about_corrected(anns_field):
            fields = rewrite.fields(output_fields)
            results = super().search(
                collection_name, data, filter, limit, fields.requested, search_params, ids=ids, **options
            )
            for hits in results:
                rewrite.entities_out((hit["entity"] for hit in hits), fields)
            return results
        if ids is not None:
            data = self._vectors_of(collection_name, state, ids, timeout)
        if strength is None:
            strength = self._strength
        kept = self._kept(state) if rerank is not None or rewrite.is_gated(strength) else None
        asked = rewrite.ask(
            data,
            search_params,
            output_fields,
            strength=strength,
            limit=limit,
            offset=int(options.pop("offset", 0)),
            round_decimal=options.pop("round_decimal", -1),
            rerank=rerank,
            bank=kept.queries.vectors if kept else None,
            activated=kept.activated if kept else frozenset(),
        )
        results = super().search(
            collection_name,
            asked.data,
            filter,
            asked.limit,
            asked.output_fields,
            asked.search_params,
            **options,
            **({"offset": asked.offset} if asked.offset else {}),
        )
        return asked.answer(results)

    def _vectors_of(
        self, collection_name: str, state: CollectionState, ids: Any, timeout: float | None
    ) -> list[list[float]]:
        keys = ids if isinstance(ids, list) else [ids]
        rows = self.get(collection_name, keys, output_fields=[state.field], timeout=timeout)
        key_field = self._key_field(collection_name)
        by_key = {row[key_field]: row[state.field] for row in rows}
        if missing := [key for key in keys if key not in by_key]:
            raise InvalidInput(f"no rows of these ids to search with: {missing}")
        return [by_key[key] for key in keys]

    def _key_field(self, collection_name: str) -> str:
        fields = self._plain.describe_collection(collection_name)["fields"]
        return next(str(field["name"]) for field in fields if field.get("is_primary"))

    def query(
        self,
        collection_name: str,
        filter: str = "",
        output_fields: list[str] | None = None,
        timeout: float | None = None,
        ids: Any = None,
        partition_names: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As MilvusClient.query."""
        state = self._state(collection_name, timeout)
        if state is None:
            return super().query(
                collection_name, filter, output_fields, timeout, ids, partition_names, **kwargs
            )
        rewrite = Rewrite(state)
        fields = rewrite.fields(output_fields, default_all=True)
        rows = super().query(
            collection_name, filter, fields.requested, timeout, ids, partition_names, **kwargs
        )
        rewrite.entities_out(rows, fields)
        return rows

    def get(
        self,
        collection_name: str,
        ids: Any,
        output_fields: list[str] | None = None,
        timeout: float | None = None,
        partition_names: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As MilvusClient.get."""
        state = self._state(collection_name, timeout)
        if state is None:
            return super().get(collection_name, ids, output_fields, timeout, partition_names, **kwargs)
        rewrite = Rewrite(state)
        fields = rewrite.fields(output_fields, default_all=True)
        rows = super().get(collection_name, ids, fields.requested, timeout, partition_names, **kwargs)
        rewrite.entities_out(rows, fields)
        return rows

    def hybrid_search(self, collection_name: str, *args: Any, **kwargs: Any) -> Any:
        """As MilvusClient.hybrid_search. Raises UnsupportedOperation on a corrected collection."""
        self._refuse_corrected(collection_name, "hybrid_search")
        return super().hybrid_search(collection_name, *args, **kwargs)

    def search_iterator(self, collection_name: str, *args: Any, **kwargs: Any) -> Any:
        """As MilvusClient.search_iterator. Raises UnsupportedOperation on a corrected collection."""
        self._refuse_corrected(collection_name, "search_iterator")
        return super().search_iterator(collection_name, *args, **kwargs)

    def query_iterator(self, collection_name: str, *args: Any, **kwargs: Any) -> Any:
        """As MilvusClient.query_iterator. Raises UnsupportedOperation on a corrected collection."""
        self._refuse_corrected(collection_name, "query_iterator")
        return super().query_iterator(collection_name, *args, **kwargs)

    def _refuse_corrected(self, collection_name: str, method: str) -> None:
        if self._state(collection_name, None) is not None:
            raise UnsupportedOperation(
                f"{method} does not speak corrected collections yet, and {collection_name!r} is one"
            )

    # -- descriptions -----------------------------------------------------------------------------------

    def hubness_state(self, collection_name: str) -> CollectionState | None:
        """What the collection knows about its biases now; None where it carries none."""
        self._states.pop(collection_name, None)
        return self._state(collection_name, None)

    def describe_collection(
        self, collection_name: str, timeout: float | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As MilvusClient.describe_collection, of the collection as the user made it."""
        description: dict[str, Any] = super().describe_collection(collection_name, timeout, **kwargs)
        state = read_state(description.get("properties", {}))
        return Rewrite(state).description_out(description) if state else description

    def describe_index(
        self, collection_name: str, index_name: str, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """As MilvusClient.describe_index, with the user's metric."""
        index = super().describe_index(collection_name, index_name, timeout, **kwargs)
        state = self._state(collection_name, timeout)
        return Rewrite(state).index_out(index) if state else index

    # -- what makes a remembered state wrong --------------------------------------------------------------

    def create_collection(self, collection_name: str, *args: Any, **kwargs: Any) -> Any:
        """As MilvusClient.create_collection."""
        self._states.clear()
        return super().create_collection(collection_name, *args, **kwargs)

    def drop_collection(self, collection_name: str, timeout: float | None = None, **kwargs: Any) -> Any:
        """As MilvusClient.drop_collection."""
        self._states.clear()
        return super().drop_collection(collection_name, timeout, **kwargs)

    def rename_collection(self, *args: Any, **kwargs: Any) -> Any:
        """As MilvusClient.rename_collection."""
        self._states.clear()
        return super().rename_collection(*args, **kwargs)

    def alter_alias(self, *args: Any, **kwargs: Any) -> Any:
        """As MilvusClient.alter_alias."""
        self._states.clear()
        return super().alter_alias(*args, **kwargs)

    def drop_alias(self, *args: Any, **kwargs: Any) -> Any:
        """As MilvusClient.drop_alias."""
        self._states.clear()
        return super().drop_alias(*args, **kwargs)

    def use_database(self, db_name: str, **kwargs: Any) -> None:
        """As MilvusClient.use_database."""
        super().use_database(db_name, **kwargs)
        self._plain.use_database(db_name, **kwargs)
        self._states.clear()

    def close(self) -> None:
        """As MilvusClient.close."""
        super().close()
        self._plain.close()

    def _state(self, collection_name: str, timeout: float | None) -> CollectionState | None:
        """The collection's state, asked for at most once in `state_ttl` seconds. A collection that is not
        there has none: the call that follows reports it in Milvus's own words."""
        known = self._states.get(collection_name)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        try:
            description = self._plain.describe_collection(collection_name, timeout)
        except MilvusException as error:
            if error.code == COLLECTION_NOT_FOUND:
                return None
            raise
        state = read_state(description.get("properties", {}))
        self._states[collection_name] = (time.monotonic() + self._state_ttl, state)
        return state
