"""Secrets replaced by *** in every text that leaves the process: errors, JSON, events, pages, metrics."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
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
