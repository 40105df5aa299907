"""The methods that both clients share: signatures, docstrings and operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pymilvus import AnnSearchRequest

from milvus_hubness.basics.defaults import STATE_TTL
from milvus_hubness.basics.words import expect_arguments, expect_word
from milvus_hubness.clients.steps import Ask
from milvus_hubness.correction.overrides import NONE, Overrides
from milvus_hubness.correction.rerank import Adaptive, GloballyCorrected
from milvus_hubness.errors import InvalidParameter
from milvus_hubness.milvus.client.collection_methods import CollectionMethods
from milvus_hubness.milvus.client.messages import (
    OF_CLIENTS,
    OF_SEARCHES,
    Bias,
    Deletion,
    HybridQuestion,
    Question,
    Write,
)
from milvus_hubness.milvus.client.steps import (
    ClientPolicy,
    Effect,
    PlainConnection,
    Step,
    refusing,
)
from milvus_hubness.milvus.pymilvus_private import forget_schema
from milvus_hubness.milvus.store.keepalive import with_keepalive

if TYPE_CHECKING:
    from milvus_hubness.milvus.client.query_samples import Sampled

DEFAULT_BANK_BUDGET = 1 << 30
"""Bytes of query banks that a client holds in memory."""


def _expect_bias(bias: Bias) -> None:
    """Raise InvalidParameter unless a write may have this `bias`."""
    # Nearly all writes have the default one.
    if bias != "compute":
        with refusing():
            expect_word("bias", bias, Bias)


class Methods(CollectionMethods):
    """Methods of a client of pymilvus, for corrected collections.

    Each method describes its call, and `_run` runs the operation. So they return the result in
    HubnessClient, and an awaitable of it in AsyncHubnessClient. A subclass inherits from this class
    first and from a client of pymilvus second.
    """

    _perform: Callable[[Effect], Any]
    """Runs a step that is not a request of pymilvus's own client."""
    policy = ClientPolicy()

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
        kinds: float | None = None,
        state_ttl: float = STATE_TTL,
        bank_budget: int = DEFAULT_BANK_BUDGET,
        sample_queries: bool = True,
        **kwargs: Any,
    ) -> None:
        # Here, as they need more modules than pymilvus's client:
        # programs that only name the class start sooner.
        from milvus_hubness.milvus.client.held_errors import watch_pymilvus
        from milvus_hubness.milvus.client.operations import Operations
        from milvus_hubness.milvus.store.server import expect_milvus

        watch_pymilvus()
        with refusing():
            expect_milvus(uri)
            expect_arguments(kwargs, OF_CLIENTS)
            if not isinstance(sample_queries, bool):
                raise InvalidParameter(
                    f"sample_queries must be true or false, not {sample_queries!r}: "
                    "the bank has a rate"
                )

            kwargs = with_keepalive(uri, kwargs)
            self._plain = PlainConnection(
                uri, db_name, timeout, user=user, password=password, token=token, **kwargs
            )
            self._operations = Operations(
                Overrides(strength, kinds),
                state_ttl,
                bank_budget,
                self._plain.client if sample_queries else None,
                self.policy,
            )

        super().__init__(uri, user, password, db_name, token, timeout, **kwargs)  # type: ignore[call-arg]

    def _answer(self, step: Step) -> Any:
        if isinstance(step, Ask):
            # pymilvus's own method, behind the one of this package that has the same name.
            request = getattr(super(CollectionMethods, self), step.method)
            return request(*step.args, **step.options)
        return self._perform(step)

    def _expect_arguments(self, options: Mapping[str, Any], names: Sequence[str]) -> None:
        """Raise InvalidParameter, as a MilvusException too, for a mistyped argument."""
        if options:
            with refusing():
                expect_arguments(options, names)

    def _learn_schema(self, connection: Any, collection: str) -> None:
        forget_schema(self, connection, collection)

    def _leave_database(self, new_database: str) -> None:
        self._operations.discard_samples()
        self._plain.use_database(new_database)
        self._operations.states.forget()

    # -- writes ------------------------------------------------------------------------------------

    def insert(
        self,
        collection_name: str,
        data: dict[str, Any] | list[dict[str, Any]],
        timeout: float | None = None,
        partition_name: str | None = "",
        *,
        bias: Bias = "compute",
        **kwargs: Any,
    ) -> Any:
        """Insert rows as pymilvus does, and compute their biases from the bank.

        bias="pending" gives rows the mean bias until the next refresh. Raises BankTooLarge if
        bank_budget has no room for the bank, HubRefused for a row that the hub guard of the
        collection refuses, and DimensionMismatch, NonFiniteVectors and, under COSINE, ZeroVectors,
        with the rows in the message.
        """
        _expect_bias(bias)
        write = Write("insert", collection_name, data, timeout, partition_name, bias, kwargs)
        self._expect_arguments(kwargs, ["bias"])
        return self._run(self._operations.dual_writes.write(write))

    def upsert(
        self,
        collection_name: str,
        data: dict[str, Any] | list[dict[str, Any]],
        timeout: float | None = None,
        partition_name: str | None = "",
        *,
        bias: Bias = "compute",
        **kwargs: Any,
    ) -> Any:
        """Upsert rows as pymilvus does, and compute the bias of rows that have a vector.

        A partial update without a vector leaves the vector
        and the bias as they are. Raises as `insert` does.
        """
        _expect_bias(bias)
        write = Write("upsert", collection_name, data, timeout, partition_name, bias, kwargs)
        self._expect_arguments(kwargs, ["bias"])
        return self._run(self._operations.dual_writes.write(write))

    def write_import_files(
        self,
        collection_name: str,
        data: Iterable[dict[str, Any]],
        folder: str | Path,
        timeout: float | None = None,
        *,
        bias: Bias = "compute",
    ) -> Any:
        """Write new rows, with their biases, to Parquet files for a bulk import.

        Returns the paths. Raises as `insert` does, and UnsupportedOperation if the biases are in a
        side collection or a job works on the collection.
        """
        _expect_bias(bias)
        operation = self._operations.writes.write_import_files(
            collection_name, data, Path(folder), bias, timeout
        )
        return self._run(operation)

    def delete(
        self,
        collection_name: str,
        ids: list[Any] | str | int | None = None,
        timeout: float | None = None,
        filter: str | None = None,
        partition_name: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Delete rows as pymilvus does."""
        deletion = Deletion(collection_name, ids, timeout, filter, partition_name, kwargs)
        return self._run(self._operations.dual_writes.delete(deletion))

    # -- searches and reads ------------------------------------------------------------------------

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
        kinds: float | None = None,
        profile: str | None = None,
        rerank: GloballyCorrected | Adaptive | None = None,
        candidates: int | None = None,
        with_raw_score: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Search as pymilvus does, ranked by the corrected score.

        strength: w; 1 is the full correction, 0 gives the raw ranking and the raw scores.
        kinds: 1, the default, compares vectors with the means of their kinds, on a field with kinds;
        0 does not. So the raw ranking there takes strength=0 and kinds=0.
        profile: name of the bias profile.
        rerank: ranks more raw candidates against the bank or, if it is a QuariReranker, more
        corrected candidates by its model.
        candidates: how many; None uses the number of the re-ranker.
        with_raw_score: hits also have their uncorrected score, as "raw_score".

        On a field that is not corrected, these have no effect, except that a QuariReranker raises
        UnsupportedOperation. Raises DimensionMismatch, InvalidInput, InvalidParameter.
        """
        self._expect_arguments(kwargs, OF_SEARCHES)
        says_nothing = strength is None and kinds is None and profile is None
        question = Question(
            data,
            limit,
            search_params=search_params,
            output_fields=output_fields,
            overrides=NONE if says_nothing else Overrides(strength, kinds, profile),
            rerank=rerank,
            candidates=candidates,
            with_raw_score=with_raw_score,
        )
        options = {"timeout": timeout, **kwargs}
        # What is not set is left out: fewer arguments take less time on their way.
        for name, value in (
            ("partition_names", partition_names),
            ("anns_field", anns_field),
            ("ranker", ranker),
            ("function_chains", function_chains),
            ("search_aggregation", search_aggregation),
            ("highlighter", highlighter),
        ):
            if value is not None:
                options[name] = value
        operation = self._operations.searches.search(
            collection_name, question, filter, options, ids=ids
        )
        return self._run(operation)

    def match(
        self,
        collection_name: str,
        queries: Any,
        limit: int = 10,
        filter: str = "",
        search_params: dict[str, Any] | None = None,
        timeout: float | None = None,
        partition_names: list[str] | None = None,
        anns_field: str | None = None,
        *,
        candidates: int = 200,
        with_bank: bool = False,
        one_to_one: bool = False,
        folder: str | Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Match a batch of queries with rows.

        Each row gets a bias that balances the queries against all rows.

        queries: (m, d).
        candidates: rows that the index finds for each query, by raw score.
        with_bank: the stored bank joins the queries, which helps if these ask for some of the rows
        only.
        one_to_one: each row goes to at most one query, and limit has no effect.
        folder: for parts, from which an interrupted call with the same arguments continues.
        progress: called with the step, and the done and total numbers.

        Returns `Matches`. Raises MissingExtra without milvus-hubness[jobs], UnreadableFile for
        parts that cannot be used, and as `search` does.
        """
        from milvus_hubness.milvus.client.matching import match

        own_options = ("candidates", "with_bank", "one_to_one", "folder", "progress")
        self._expect_arguments(kwargs, own_options)
        options = {
            "search_params": search_params,
            "timeout": timeout,
            "partition_names": partition_names,
            **kwargs,
            "anns_field": anns_field,
        }
        operation = match(
            self._operations,
            collection_name,
            queries,
            limit,
            filter,
            options,
            candidates=candidates,
            with_bank=with_bank,
            one_to_one=one_to_one,
            folder=Path(folder) if folder else None,
            progress=progress,
        )
        return self._run(operation)

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
        """Query as pymilvus does."""
        options = {
            "ids": ids,
            "output_fields": output_fields,
            "timeout": timeout,
            "partition_names": partition_names,
            **kwargs,
        }
        request = Ask("query", (collection_name, filter), options)
        return self._run(self._operations.reads.read(request))

    def get(
        self,
        collection_name: str,
        ids: Any,
        output_fields: list[str] | None = None,
        timeout: float | None = None,
        partition_names: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Get rows as pymilvus does."""
        options = {
            "output_fields": output_fields,
            "timeout": timeout,
            "partition_names": partition_names,
            **kwargs,
        }
        request = Ask("get", (collection_name, ids), options)
        return self._run(self._operations.reads.read(request))

    def hybrid_search(
        self,
        collection_name: str,
        reqs: list[AnnSearchRequest],
        ranker: Any,
        limit: int = 10,
        output_fields: list[str] | None = None,
        timeout: float | None = None,
        partition_names: list[str] | None = None,
        *,
        strength: float | None = None,
        kinds: float | None = None,
        profile: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Search as pymilvus's hybrid_search does, with corrected scores on corrected fields.

        If the server cannot weigh a corrected field in the user's metric, the client sends the
        requests one by one and merges the answers as Milvus does. Raises UnsupportedOperation if
        that needs groups, or a ranker other than RRFRanker and WeightedRanker.
        """
        self._expect_arguments(kwargs, OF_SEARCHES)
        options = {"timeout": timeout, "partition_names": partition_names, **kwargs}
        question = HybridQuestion(
            reqs, ranker, limit, output_fields, Overrides(strength, kinds, profile)
        )
        return self._run(
            self._operations.searches.hybrid_search(collection_name, question, options)
        )

    @property
    def hubness_samples(self) -> Sampled:
        """Counts of the queries that this client sampled."""
        return self._operations.sampled
