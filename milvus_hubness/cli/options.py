"""The options that commands share: types, and groups of them as dataclasses."""

from __future__ import annotations

import json
import logging
import os
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from milvus_hubness.basics.defaults import (
    CA_VARIABLE,
    CERT_VARIABLE,
    DEFAULT_MEASURE,
    KEY_VARIABLE,
    URI_VARIABLES,
    WHERE_FROM,
    OnHub,
)
from milvus_hubness.basics.estimator_names import installed_estimators, own_aliases
from milvus_hubness.basics.files import opening
from milvus_hubness.basics.texts import describe
from milvus_hubness.errors import (
    HubnessError,
    InvalidParameter,
    redacted,
    remember_secrets,
    secrets_in,
)

if TYPE_CHECKING:
    from milvus_hubness.basics.files.certificates import Certificates
    from milvus_hubness.correction.banks.bank import QueryBank
    from milvus_hubness.correction.estimators import Estimator
    from milvus_hubness.jobs.common.judgements import Judgements
    from milvus_hubness.jobs.common.priors import PriorLike
    from milvus_hubness.jobs.common.recipe import Recipe
    from milvus_hubness.jobs.store.protocols import Store

TOKEN_VARIABLE = "MILVUS_HUBNESS_TOKEN"
APPLICATION_TOKEN_VARIABLE = "MILVUS_HUBNESS_APPLICATION_TOKEN"
FILE_SUFFIX = "_FILE"
"""After the name of a variable with a token, that of one with the path of a file with the token."""
DEFAULT_URI = "http://localhost:19530"

Uri = Annotated[
    str,
    "Milvus server, with /DATABASE at its end for another than the default one; path of a Milvus Lite "
    ".db file; or an address such as qdrant+http://HOST:PORT.",
    {"envvar": [*URI_VARIABLES]},
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Field = Annotated[
    str | None, "Vector field, required if the collection has several to choose from."
]
TargetBank = Annotated[str | None, "Reference items, in the forms of --bank; for dualis and dbsn."]
BankName = Annotated[str | None, "Collection to store the bank in. [default: COLLECTION__bank]"]
Gate = Annotated[
    int | None,
    "Correct only queries whose raw best item is among the GATE nearest of a bank query; 0: all. "
    "[default: as tune chose, else 0]",
]
Kind = Annotated[
    str | None,
    "Field of the rows with the kind of each, such as its modality or language, of at most 16 values: "
    "items are compared with the mean of their kind. `auto`: the two kinds that the vectors show, if "
    "they do.",
]
Guard = Annotated[
    OnHub | None,
    "What clients do with a new row that would be among the best answers of too much of the bank: log "
    "it, or refuse the write. [default: off]",
]
PairsQueries = Annotated[
    str | None,
    "Vectors of the queries that --pairs names by id: a file with 'query_id' and 'query'.",
]
QueryText = Annotated[
    str | None, "Column with the texts of the queries, in the file or collection that holds these."
]
RowsPerSecond = Annotated[float | None, "Maximum rows written per second. [default: no limit]"]


Queries = Annotated[
    str | None,
    "Real queries of the application, at least 20 apart from --bank and in its forms, without "
    "labels: on them the bank is judged. [default: half of the bank]",
]


@dataclass(frozen=True)
class Connection:
    """The option that selects the database. Its token comes from the environment."""

    uri: Uri = DEFAULT_URI

    @property
    def words(self) -> list[str]:
        """The words that select this database in a further command; none if it finds it without."""
        by_default = next(filter(None, map(os.environ.get, URI_VARIABLES)), DEFAULT_URI)
        return [] if self.uri == by_default else ["--uri", self.uri]

    def command(self, *words: str) -> str:
        """Return a further command on this database as a shell takes it."""
        return redacted(shlex.join(["milvus-hubness", *words, *self.words]))

    def open(self) -> Store:
        """Return the store of the database, the same one each time. Raises as `open_store` does."""
        return self._store

    def open_as_application(self) -> Store | None:
        """Return a store with the token of an application; None if there is no such token.

        Raises as `open` does.
        """
        token = token_of(APPLICATION_TOKEN_VARIABLE)
        return open_store(self.uri, token, certificates()) if token else None

    @cached_property
    def _store(self) -> Store:
        return open_store(self.uri, token_of(), certificates())

    def for_client(self) -> dict[str, Any]:
        """Return the arguments with which a MilvusClient connects, without the address.

        Raises InvalidParameter, UnreadableFile.
        """
        from milvus_hubness.milvus.store.server import tls_options

        return {
            "token": token_of(),
            **tls_options(self.uri, certificates()),
        }


def certificates(
    ca: str | None = None, cert: str | None = None, key: str | None = None
) -> Certificates:
    """Return the files for TLS: these, or those that the environment names. Raises InvalidParameter."""
    from milvus_hubness.basics.files.certificates import Certificates

    given = {"ca": ca or None, "cert": cert or None, "key": key or None}
    variables = {"ca": CA_VARIABLE, "cert": CERT_VARIABLE, "key": KEY_VARIABLE}
    for name, variable in variables.items():
        given[name] = given[name] or _file_in(variable)
    return Certificates(**given)


def _file_in(variable: str) -> str | None:
    """Return the path in a variable of the environment; None if it is not set. Raises InvalidParameter."""
    path = os.environ.get(variable)
    if path and not Path(path).exists():
        raise InvalidParameter(
            f"${variable} names {path!r}, which is not there: correct it, or unset it"
        )
    return path or None


def open_store(uri: str, token: str, certificates: Certificates) -> Store:
    """Return the store of a database. Raises InvalidParameter, ServerUnavailable."""
    from milvus_hubness.api import databases

    open_by = databases.opener_of(uri)
    # pymilvus sets its level when it is imported, and would log the traceback of each error that a
    # command reports.
    for library in ("pymilvus", "milvus_lite", "grpc"):
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)

    # Errors of the server may quote the address: what is remembered is left out of all output.
    remember_secrets(*secrets_in(uri))
    return open_by(token, certificates)


def token_of(variable: str = TOKEN_VARIABLE) -> str:
    """Return the token in a variable of the environment, or in the file that `variable`_FILE names;
    empty if neither is set.

    An argument would be readable in the process list. Raises InvalidParameter if both are set, and
    UnreadableFile.
    """
    token = os.environ.get(variable, "")
    path = _file_in(variable + FILE_SUFFIX)
    if token and path:
        raise InvalidParameter(
            f"${variable} and ${variable}{FILE_SUFFIX} are both set: unset one of them"
        )
    return read_token(path) if path else remembered(token)


def read_token(path: str | Path) -> str:
    """Return the token in a file. Raises UnreadableFile."""
    return remembered(opening.read_token(path))


def remembered(token: str) -> str:
    """Return a token that all output leaves out from now on."""
    remember_secrets(token)
    return token


@dataclass(frozen=True)
class BankOptions:
    """The options that name the query bank."""

    bank: Annotated[
        str,
        "Reference queries: .npy, .npz, .parquet, .arrow, .csv or .jsonl file, collection:NAME, or "
        "`samples` for those that clients sampled.",
    ] = ""
    bank_column: Annotated[
        str | None, "Array, column or vector field of --bank that holds the queries."
    ] = None

    def require(self, connection: Connection, collection: str, field: str | None = None) -> None:
        """Check that a bank is named, before anything else is done. Raises typer.BadParameter.

        The message says whether queries of the field are sampled, if the database answers.
        """
        if self.bank:
            return
        try:
            self.expect(connection.open(), collection, field)
        except HubnessError:
            raise typer.BadParameter(
                f"no reference queries: pass --bank FILE ({WHERE_FROM})"
            ) from None

    def expect(self, store: Store, collection: str, field: str | None = None) -> None:
        """Raise typer.BadParameter if no bank is named."""
        from milvus_hubness.jobs.common.samples import missing_bank

        if not self.bank:
            where_from = missing_bank(store, collection, field)
            raise typer.BadParameter(f"no reference queries: {where_from}")

    def expect_column(self) -> None:
        """Raise typer.BadParameter if a column of nothing is named."""
        from milvus_hubness.jobs.common.samples import SAMPLES

        if self.bank_column and self.bank in ("", SAMPLES):
            raise typer.BadParameter(
                "--bank-column is of a file or a collection: name this with --bank, or leave it out"
            )

    def read(self, store: Store, collection: str, field: str | None = None) -> QueryBank | None:
        """Return the bank; None if none is named.

        collection, field: whose samples `--bank samples` means.
        """
        from milvus_hubness.jobs.common.samples import SAMPLES, sampled_bank

        self.expect_column()
        if self.bank == SAMPLES:
            return sampled_bank(store, collection, field)
        return read_vectors(store, self.bank, self.bank_column)


def read_vectors(store: Store, spec: str | None, column: str | None = None) -> QueryBank | None:
    """Return the vectors of a file or collection; None if none is named."""
    from milvus_hubness.jobs.common.inputs import read_bank

    return read_bank(store, spec, column) if spec else None


Force = Annotated[bool, "Go on even if the verdict on the bank is to leave the collection alone."]

ClickKeyColumn = Annotated[
    str | None,
    "Column with the keys in --prior-from, if it is not called key, id, sku, product_id or the like.",
]
KeyColumn = Annotated[
    str | None,
    "Column with the keys in --pairs, in --prior-from, and in the file of --items, if it is not called "
    "key, id, sku, product_id or the like.",
]


@dataclass(frozen=True)
class PairsOptions:
    """The options that name queries with right rows."""

    pairs: Annotated[
        str | None,
        "Queries with right rows: .npz, .parquet, .arrow, .csv or .jsonl file with 'query' and 'key', "
        "one or several of each, and optionally 'grade'; a qrels file, or a BEIR folder. 'weight' says "
        "how often users send a query, which all measures follow.",
    ] = None
    pairs_queries: PairsQueries = None
    key_column: KeyColumn = None
    ignore_identical: Annotated[
        bool,
        "Queries of --pairs are rows themselves (as in ArguAna and Quora): the row whose key is the id "
        "of a query is no answer to it, as evaluators have it.",
    ] = False
    measure: Annotated[
        str,
        "What decides with --pairs: R@k (a right row among the first k), MRR, MAP or nDCG@k, whose "
        "gain is the grade.",
    ] = DEFAULT_MEASURE

    def __post_init__(self) -> None:
        if self.measure != DEFAULT_MEASURE and self.pairs is None:
            raise typer.BadParameter("--measure needs right answers: pass --pairs")
        if self.ignore_identical and self.pairs is None:
            raise typer.BadParameter("--ignore-identical needs ids of queries: pass --pairs")

    def read(self, text_column: str | None = None, other: str | None = None) -> Judgements | None:
        """Return the judgements; None if none are named.

        text_column: the column with the texts of the queries. other: a file of items or of clicks, in
        which the column of keys may be instead. Raises as `Measure.of` and `Judgements.load`.
        """
        from milvus_hubness.jobs.common.gallery import key_column_of
        from milvus_hubness.jobs.common.judgements import Judgements
        from milvus_hubness.quality.retrieval import Measure

        # Before the files, of which there may be much to read and to say.
        Measure.of(self.measure)
        if self.key_column is not None and self.pairs is None and other is None:
            raise typer.BadParameter(
                "--key-column is of a file with keys: pass --pairs, or leave it out"
            )
        if self.pairs is None:
            if self.pairs_queries is not None:
                raise typer.BadParameter("--pairs-queries needs --pairs, which names its queries")
            return None
        judgements = Judgements.load(
            self.pairs,
            self.pairs_queries,
            text_column=text_column,
            key_column=key_column_of(self.pairs, self.key_column, other),
        )
        return judgements.ignoring_identical() if self.ignore_identical else judgements


@dataclass(frozen=True)
class PriorOptions:
    """The options that say how often each row is wanted."""

    prior: Annotated[
        str | None,
        "Field of the rows with a number from 0 up that says how often each is wanted, such as "
        "clicks: popular rows rank higher; `bank` takes the demand that the bank itself shows. "
        "[default: that of the bank, with the default method]",
    ] = None
    prior_from: Annotated[
        str | None,
        "In place of --prior: a log of clicks in the form of --pairs, in which each row is counted.",
    ] = None
    prior_weight: Annotated[
        float | None,
        "Weight of the prior in units of the spread of scores, such as 0.2. [default: as tune "
        "chose, else 0]",
    ] = None

    def __post_init__(self) -> None:
        # Typer makes this record while it reads the command line, so it is an error of usage.
        if self.prior and self.prior_from:
            raise typer.BadParameter("give --prior or --prior-from: a prior has one source")

    def read_prior(
        self, key_column: str | None = None, pairs: str | None = None
    ) -> PriorLike | None:
        """Return the field or the clicks; None if neither is named.

        key_column: that of the clicks, unless it is one of the file `pairs`. Raises as `read_clicks`.
        """
        from milvus_hubness.jobs.common.gallery import key_column_of
        from milvus_hubness.jobs.common.judgements import read_clicks

        if self.prior_from is None:
            if key_column is not None and pairs is None:
                raise typer.BadParameter(
                    "--key-column is of a file with keys: pass --prior-from, or leave it out"
                )
            return self.prior
        return read_clicks(self.prior_from, key_column_of(self.prior_from, key_column, pairs))


def _complete_method(incomplete: str) -> list[str]:
    names = [*own_aliases(), *(installed.name for installed in installed_estimators())]
    return [name for name in names if name.startswith(incomplete)]


@dataclass(frozen=True)
class EstimatorOptions:
    """The options that choose the estimator."""

    method: Annotated[
        str | None,
        f"Estimator: {', '.join(own_aliases())}; or one of an installed package.",
        {"autocompletion": _complete_method},
    ] = None
    param: Annotated[
        list[str] | None,
        "NAME=VALUE, a parameter of the estimator; repeatable. Without --method and with none in use, "
        "it is one of nnn, such as k=8. tau is in units of the score, temperature in units of the "
        "spread of scores.",
    ] = None

    def estimator(self, current: dict[str, Any] | None = None) -> Estimator | None:
        """Return the estimator of the options; None if they name none.

        current: the estimator in use, as its dictionary; its parameters apply unless the options
        name them. Parameters without --method mean NNN then. Raises InvalidParameter.
        """
        from milvus_hubness.correction.estimators import from_dict
        from milvus_hubness.correction.estimators.base import class_name, with_parameters

        parameters = pairs_of(self.param, "--param")
        if isinstance(parameters.get("alpha"), int | float) and parameters["alpha"] <= 0:
            raise InvalidParameter(
                f"alpha must be above 0, not {parameters['alpha']!r}: 0 corrects nothing"
            )
        if self.method is None and not parameters:
            return None

        # Parameters alone change the estimator in use.
        if self.method is None and current is not None:
            methods = {"k": "--method nnn or csls", "alpha": "--method nnn"}
            for name in (name for name in parameters if name in methods and name not in current):
                raise InvalidParameter(
                    f"--param {name} needs {methods[name]}: the current {describe(current)} has no "
                    f"{name}"
                )

            return from_dict(with_parameters(current, parameters))

        name = class_name(self.method or "nnn")
        return from_dict(with_parameters({"name": name}, parameters))

    @property
    def names_estimator(self) -> bool:
        """Whether any of the options is given."""
        return any(option is not None for option in (self.method, self.param))


@dataclass(frozen=True)
class RecipeOptions(PriorOptions, EstimatorOptions, BankOptions):
    """The options of all jobs that are words of a Recipe."""

    target_bank: TargetBank = None
    queries: Queries = None
    gate: Gate = None

    def recipe(
        self,
        store: Store,
        collection: str,
        field: str | None,
        *,
        key_column: str | None = None,
        pairs: str | None = None,
        current: dict[str, Any] | None = None,
        force: bool = False,
        **more: Any,
    ) -> Recipe:
        """Return what the options ask for, with the vectors read; samples are left to the job.

        field: that of `collection` to correct. key_column, pairs: as in `read_prior`. current: as in
        `estimator`. force: whether to go on after a verdict against the bank. more: further words.
        Raises as `Recipe` does, and what reading the files raises.
        """
        from milvus_hubness.jobs.common.recipe import Recipe
        from milvus_hubness.jobs.common.samples import SAMPLES

        self.expect_column()
        bank = self.bank if self.bank == SAMPLES else self.read(store, collection, field)
        return Recipe(
            bank,
            target_bank=read_vectors(store, self.target_bank),
            estimator=self.estimator(current),
            gate=self.gate,
            prior=self.read_prior(key_column, pairs),
            prior_weight=self.prior_weight,
            queries=read_vectors(store, self.queries),
            verdict="warn" if force else None,
            **more,
        )


@dataclass(frozen=True)
class CorrectionOptions(RecipeOptions):
    """The options of the jobs that correct a collection for the first time."""

    key_column: ClickKeyColumn = None
    bank_name: BankName = None
    field: Field = None
    on_hub: Guard = None
    force: Force = False

    def recipe_for(self, store: Store, collection: str, **more: Any) -> Recipe:
        """Return which biases the collection gets. more: further words. Raises as `recipe` does."""
        return self.recipe(
            store,
            collection,
            self.field,
            key_column=self.key_column,
            force=self.force,
            on_hub=self.on_hub,
            **more,
        )


def pairs_of(texts: list[str] | None, option: str) -> dict[str, Any]:
    """Return the names and values of NAME=VALUE texts.

    Raises InvalidParameter, which names the option.
    """
    result: dict[str, Any] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidParameter(f"{option} must be NAME=VALUE, not {text!r}")
        # Numbers, true and null as JSON has them; anything else is a text, without quotes.
        try:
            result[name] = json.loads(value)
        except ValueError:
            result[name] = value

    return result
