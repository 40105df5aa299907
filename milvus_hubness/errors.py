"""The exceptions of this package, and the masking of secrets in texts.

HubnessError
├── InvalidInput (also a ValueError)      the caller's data or arguments are wrong
│   ├── DimensionMismatch                 vectors of another width than the collection or the bank
│   ├── NonFiniteVectors                  NaN or infinity, with the rows
│   ├── ZeroVectors                       no direction to normalise, with the rows
│   ├── EmptyBank                         a bank without a single query
│   ├── BankTooSmall                      the estimator needs more queries than the bank holds
│   ├── BankTooLarge                      the bank does not fit into the memory that was granted
│   ├── InvalidParameter                  an estimator, layout or job parameter out of range
│   │   └── InvalidConfig                 a configuration file, with every line that is wrong
│   ├── EncoderMismatch                   a network that was trained for vectors of another encoder
│   └── UnreadableFile                    a bank file that is missing, broken or of an unknown kind
├── StoreError                            the database refused or did not answer
│   ├── ServerUnavailable
│   ├── CollectionNotFound
│   ├── CollectionExists
│   ├── EmptyCollection
│   ├── DualWriteFailed                      written to a collection, not to the one it is being carried to
│   └── WriteIntentFailed                     a write could not be noted while a refresh rewrites rows
├── StateError                            what the collection says about its biases does not allow this
│   ├── AlreadyCorrected
│   ├── NotCorrected
│   ├── UnfinishedMigration
│   ├── ResumeRefused                     an unfinished migration was begun with other arguments
│   ├── NoMigration                       the ledger knows of none
│   ├── WrongPhase                        the migration is not where this step begins
│   ├── LeaseHeld                         another process is at work on the collection
│   ├── LeaseLost                         another process has taken over from this one
│   ├── Cancelled                           as asked, between two batches; the next run carries on
│   ├── NotCaughtUp                       rows keep changing that no client writes to the copy too
│   ├── CorrectionNotRecommended                        tuning found that correction would hurt
│   └── UnknownStateVersion
├── CannotMigrate                         the collection has something that cannot be carried over
├── NoSpareColumns                                no column to spare for a further profile
├── VerificationFailed                    the copy differs from its source, with the rows
├── UnsupportedOperation                  a call that a corrected collection cannot answer
├── MissingExtra                          what was asked for needs an extra that is not installed
├── FaissConflict                         faiss-cpu and faiss-gpu are installed over each other
├── HookFailed                            a hook that must succeed before a step did not
└── CriticalLoad                          the critical-load command says that the server bears no more
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence
from urllib.parse import unquote

SECRET_VARIABLES = ("MILVUS_HUBNESS_TOKEN", "MILVUS_TOKEN", "QDRANT_API_KEY")
MASK = "***"

# The rest of a URI, and user:password@ without a scheme. Both take linear time: whole pages are redacted.
_AFTER_SCHEME = re.compile(r"""://([^\s"'<>]*)""")
_WITHOUT_SCHEME = re.compile(r"""(?<![^\s"'<>/])[^\s"'<>/:@]+:[^\s"'<>/@]*@(?=[\w\[])""")
_remembered: set[str] = set()


def redacted(text: str, secrets: Collection[str] = ()) -> str:
    """Return `text` with *** for the user and the password of each URI, for each of `secrets`, and for the
    secrets that this process knows, also where they are part of a text in JSON."""
    for secret in sorted(all_secrets(secrets), key=len, reverse=True):
        in_json = json.dumps(secret, ensure_ascii=False)[1:-1]
        text = text.replace(secret, MASK).replace(in_json, MASK)
    return _WITHOUT_SCHEME.sub(f"{MASK}@", _AFTER_SCHEME.sub(_without_userinfo, text))


def remember_secrets(*secrets: str) -> None:
    """Have `redacted` replace these as well, from now on and in all of this process."""
    _remembered.update(filter(None, secrets))


def remembered_secrets() -> frozenset[str]:
    """Return what `remember_secrets` was given."""
    return frozenset(_remembered)


def all_secrets(secrets: Collection[str] = ()) -> set[str]:
    """Return `secrets`, the remembered ones, and those in the environment of this process."""
    return {
        secret for secret in (*secrets, *_remembered.copy(), *map(os.environ.get, SECRET_VARIABLES)) if secret
    }


def secrets_in(uri: str) -> set[str]:
    """Return the user:password part of a URI, as it is written and with its percent-encoding undone. A user
    alone, such as root, is too common a word to be replaced in other texts than URIs."""
    _, scheme, rest = uri.partition("://")
    userinfo = rest.rpartition("@")[0] if scheme else ""
    return {form for form in (userinfo, unquote(userinfo)) if ":" in form}


def _without_userinfo(uri: re.Match[str]) -> str:
    # An invalid one may have "/" and "@" in its password: up to the last "@" all may be secret.
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
    """The estimator needs more queries than the bank holds."""


class BankTooLarge(InvalidInput):
    """The bank does not fit into the memory that was granted."""


class InvalidParameter(InvalidInput):
    """A parameter is out of its range."""


class InvalidConfig(InvalidParameter):
    """A configuration file is wrong; the message has a line for each place."""


class EncoderMismatch(InvalidInput):
    """A network was trained for vectors of another encoder, or does not say of which."""


class UnreadableFile(InvalidInput):
    """A file is missing, broken or of an unknown kind."""


class StoreError(HubnessError):
    """The database refused a request or did not answer."""


class ServerUnavailable(StoreError):
    """No server answers at the address."""


class CollectionNotFound(StoreError):
    """No collection or alias of that name."""


class CollectionExists(StoreError):
    """The name is taken."""


class EmptyCollection(StoreError):
    """The collection holds no rows, so there is nothing to correct."""


class DualWriteFailed(StoreError):
    """A write reached a collection that is being migrated, and not the one that its rows are carried to."""


class WriteIntentFailed(StoreError):
    """A write could not be noted in the write-intent log of a collection whose rows a refresh is
    rewriting."""


class StateError(HubnessError):
    """What the collection says about its biases does not allow this."""


class AlreadyCorrected(StateError):
    """The collection already carries biases."""


class NotCorrected(StateError):
    """The collection carries no biases."""


class UnfinishedMigration(StateError):
    """A copy that an earlier migration began and never verified."""


class ResumeRefused(StateError):
    """An unfinished migration was begun with other arguments, or its source has changed its schema since."""


class NoMigration(StateError):
    """The ledger knows of no migration of that name."""


class WrongPhase(StateError):
    """The migration is not where this step begins."""


class LeaseHeld(StateError):
    """Another process is at work on the collection; this one changed nothing."""


class LeaseLost(StateError):
    """This process was silent for so long that another one has taken over; it changes nothing more."""


class Cancelled(StateError):
    """Ended as asked, between two batches. The next run carries on from there."""


class NotCaughtUp(StateError):
    """The copy cannot follow: rows keep changing that no client of ours writes to both collections."""


class CorrectionNotRecommended(StateError):
    """Tuning on this collection and bank found that correction would hurt."""


class UnknownStateVersion(StateError):
    """The state was written by another version of this package."""


class CannotMigrate(HubnessError):
    """The collection has something that cannot be carried over."""


class VerificationFailed(HubnessError):
    """The copy differs from its source."""


class NoSpareColumns(HubnessError):
    """The stored vectors have no columns to spare."""


class UnsupportedOperation(HubnessError):
    """A call that a corrected collection cannot answer."""


class MissingExtra(HubnessError):
    """What was asked for needs an extra of this package that is not installed."""


class FaissConflict(HubnessError):
    """faiss-cpu and faiss-gpu provide the same module and are both installed."""


class HookFailed(HubnessError):
    """A hook that must succeed before a step of a migration did not."""


class CriticalLoad(HubnessError):
    """The critical-load command says that the server bears no more."""


def name_some(rows: Sequence[object], limit: int = 5) -> str:
    """The first few of `rows` for an error message: "3, 17, 40 and 12 more"."""
    shown = ", ".join(str(row) for row in rows[:limit])
    return shown if len(rows) <= limit else f"{shown} and {len(rows) - limit} more"
