"""`check`, `tune` and `diagnose` for collections of any database that users have in hand."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from milvus_hubness.api.databases import Database, of_database, store_of
from milvus_hubness.correction.banks.bank import BankLike
from milvus_hubness.jobs.common.gallery import Gallery
from milvus_hubness.reports import check as checks
from milvus_hubness.reports import collections

tune = of_database(collections.tune)
diagnose = of_database(collections.diagnose)


@wraps(checks.check)
def check(
    source: Database | Gallery | BankLike | str | os.PathLike[str],
    collection: str | None = None,
    *arguments: Any,
    **named: Any,
) -> checks.Check:
    # Without a collection, a path is that of a file with items.
    if collection is None:
        return checks.check(source, None, *arguments, **named)
    with store_of(source) as store:
        return checks.check(store, collection, *arguments, **named)
