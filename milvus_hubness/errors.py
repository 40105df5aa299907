"""The exceptions of this package, and the masking of secrets in texts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any
from urllib.parse import unquote

_SECRET_VARIABLES = (
    "MILVUS_HUBNESS_TOKEN",
    "MILVUS_HUBNESS_APPLICATION_TOKEN",
    "MILVUS_TOKEN",
    "QDRANT_API_KEY",
)
MASK = "***"

# The rest of a URI, and user:password@ without a scheme. Both take linear time, because whole pages
# are redacted.
_AFTER_SCHEME = re.compile(r"""://([^\s"'<>]*)""")
_WITHOUT_SCHEME = re.compile(r"""(?<![^\s"'<>/])[^\s"'<>/:@]+:[^\s"'<>/@]*@(?=[\w\[])""")
_remembered: set[str] = set()


def redacted(text: str, secrets: Collection[str] = ()) -> str:
    """Return `text` with *** in place of secrets, also inside JSON: the user and the password of
    each URI, each of `secrets`, and the secrets that this process remembers or has in its
    environment."""
    for secret in sorted(filter(None, _all_secrets().union(secrets)), key=len, reverse=True):
        in_json = json.dumps(secret, ensure_ascii=False)[1:-1]
        text = text.replace(secret, MASK).replace(in_json, MASK)
    return _WITHOUT_SCHEME.sub(f"{MASK}@", _AFTER_SCHEME.sub(_without_userinfo, text))


def remember_secrets(*secrets: str) -> None:
    """Make `redacted` replace these secrets as well, from now on and in the whole process."""
    _remembered.update(filter(None, secrets))


def _all_secrets() -> set[str]:
    """Return the remembered secrets and those in the environment of this process."""
    return {*_remembered.copy(), *filter(None, map(os.environ.get, _SECRET_VARIABLES))}


def secrets_in(uri: str) -> set[str]:
    """Return the user:password part of a URI, verbatim and with its percent-encoding undone. A user
    alone, such as root, is too common a word to be replaced in texts other than URIs."""
    _, scheme, rest = uri.partition("://")
    userinfo = rest.rpartition("@")[0] if scheme else ""
    return {form for form in (userinfo, unquote(userinfo)) if ":" in form}


def _without_userinfo(uri: re.Match[str]) -> str:
    # An invalid URI may have "/" and "@" in its password, so everything up to the last "@" may be
    # secret.
    _, at, address = uri[1].rpartition("@")
    return f"://{MASK}@{address}" if at else uri[0]


class HubnessError(Exception):
    """Base of every error raised by this package on purpose."""


class InvalidInput(HubnessError, ValueError):
    """The caller's data or arguments are wrong."""


class DimensionMismatch(InvalidInput):
    """Vectors of another width than the collection or the bank."""


class NonFiniteVectors(InvalidInput):
    """NaN or infinity among the vectors; the message names the rows."""


class ZeroVectors(InvalidInput):
    """A vector of length zero where a direction is needed; the message names the rows."""


class EmptyBank(InvalidInput):
    """A query bank without a single query."""


class BankTooSmall(InvalidInput):
    """The estimator needs more queries than the bank has."""


class BankTooLarge(InvalidInput):
    """The bank does not fit into its memory budget."""


class InvalidParameter(InvalidInput):
    """A parameter is out of its range."""


class InvalidConfig(InvalidParameter):
    """A configuration file is wrong; the message has a line for each mistake."""


class EncoderMismatch(InvalidInput):
    """A network was trained for vectors of another encoder, or its file does not name the
    encoder."""


class UnreadableFile(InvalidInput):
    """A file is missing, broken or of an unknown kind."""


class StoreError(HubnessError):
    """The database refused a request or did not answer."""


class ServerUnavailable(StoreError):
    """No server answers at the address."""


class WaitedTooLong(StoreError):
    """A server did not finish its work in time, such as an index; the job carries on when it is run
    again."""


class CollectionNotFound(StoreError):
    """No collection or alias of that name."""


class CollectionExists(StoreError):
    """The name is taken."""


class EmptyCollection(StoreError):
    """The collection has no rows, so there is nothing to correct."""


class PartialWrite(StoreError):
    """A write was sent in parts, and a later part failed."""

    row_count: int = 0
    """The number of rows that were written: the first ones of the write."""
    answer: dict[str, Any]
    """The answer for these rows, in pymilvus's form, with their ids."""


class DualWriteFailed(StoreError):
    """A write reached the source of a migration, but not the copy."""


class StateError(HubnessError):
    """The collection state does not allow this."""


class AlreadyCorrected(StateError):
    """The collection is corrected already."""


class NotCorrected(StateError):
    """The collection is not corrected."""


class UnfinishedMigration(StateError):
    """An earlier migration left a copy that it never verified."""


class ResumeRefused(StateError):
    """An unfinished migration was started with other arguments, or its source has changed its
    schema since."""


class NoMigration(StateError):
    """The ledger has no migration of that name."""


class WrongPhase(StateError):
    """This step does not start from the phase of the migration."""


class LeaseHeld(StateError):
    """Another process holds the lease of the collection; this one changed nothing."""


class LeaseLost(StateError):
    """This process was silent for so long that another one has taken over; it changes nothing
    more."""


class Cancelled(StateError):
    """The job ended on request, between two batches. The next run continues from there."""


class NotCaughtUp(StateError):
    """The copy cannot catch up: rows keep changing that no client of this package writes to both
    collections."""


class CorrectionNotRecommended(StateError):
    """The verdict on a bank is to leave the collection alone."""

    advice: str = ""
    """The verdict and its reason, without the way to go on all the same."""

    @classmethod
    def because(cls, advice: str) -> CorrectionNotRecommended:
        """Return the exception with the remedy of those who call from Python."""
        error = cls(f"{advice} (verdict='warn' goes on all the same)")
        error.advice = advice
        return error


class HubRefused(StateError):
    """A new row would answer so many queries that it looks like a planted hub; nothing of the write
    is stored."""

    key: object = None
    """The key of the first such row; its position in the write where the server makes keys."""
    bias: float = 0.0
    """Its bias, as the estimator gives it, less the mean bias."""
    quantile: float = 0.0
    """The share of the gallery's rows with a bias of at most this one."""
    reach: float | None = None
    """The share of bank queries that it would be among the ten best answers of; None if the
    estimator keeps no scores of the gallery."""
    rows: tuple[int, ...] = ()
    """Positions of all such rows in the write."""


class UnknownStateVersion(StateError):
    """Another version of this package wrote the state."""


class CannotMigrate(HubnessError):
    """The collection has something that cannot be copied."""


class VerificationFailed(HubnessError):
    """The copy differs from its source."""


class UnsupportedOperation(HubnessError):
    """A call that a corrected collection cannot answer."""


class MissingExtra(HubnessError):
    """The request needs an extra of this package that is not installed."""

    def __init__(self, message: str, extra: str = "") -> None:
        super().__init__(message)
        self.extra = extra


class UnsupportedVersion(HubnessError):
    """A library or a server is of a version that this package does not work with."""


class FaissConflict(HubnessError):
    """faiss-cpu and faiss-gpu provide the same module and are both installed."""


MOST_SIMILAR = 3
"""Most names that a message suggests for a mistyped one."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a message with those of `names` that a mistyped one is near to; empty without
    any. The others are no concern of the one who asks, and there may be many.
    """
    from difflib import get_close_matches

    # In other letters it is as near as can be.
    by_letters = {other.casefold(): other for other in sorted(names)}
    similar = get_close_matches(name.casefold(), by_letters, MOST_SIMILAR)
    meant = dict.fromkeys(by_letters[letters] for letters in similar)
    return f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""


def name_some(rows: Sequence[object], limit: int = 5) -> str:
    """Return the first few of `rows` for an error message: "3, 17, 40 and 12 more"."""
    shown = ", ".join(str(row) for row in rows[:limit])
    return shown if len(rows) <= limit else f"{shown} and {len(rows) - limit} more"
