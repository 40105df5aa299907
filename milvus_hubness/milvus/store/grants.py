"""Grants on a collection, which its copy does not have: Milvus grants by name."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import grpc
from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException

from milvus_hubness.jobs.migration.rights import Grant
from milvus_hubness.milvus.pymilvus_private import database_of
from milvus_hubness.milvus.store.rights import is_denied

REFUSALS = (MilvusException, grpc.RpcError)


def grants_on(client: MilvusClient, collection: str) -> list[Grant] | None:
    """Return the grants on a collection by its own name; None if the user may not read grants."""
    database = database_of(client)
    try:
        described = [client.describe_role(role, db_name=database) for role in client.list_roles()]
    except REFUSALS as error:
        if is_denied(error):
            return None
        # A database without users, as the one below some proxies.
        if isinstance(error, grpc.RpcError) and error.code() == grpc.StatusCode.UNIMPLEMENTED:
            return []
        raise

    return [
        Grant(role["role"], granted["object_type"], granted["privilege"])
        for role in described
        for granted in role["privileges"]
        if granted["object_name"] == collection
    ]


def grant_all(client: MilvusClient, collection: str, grants: Iterable[Grant]) -> list[Grant]:
    """Grant these on a collection, which need not exist; return those that the user may not grant."""
    database = database_of(client)
    refused = []
    for grant in grants:
        try:
            client.grant_privilege(
                grant.role, grant.kind, grant.privilege, collection, db_name=database
            )
        except REFUSALS as error:
            # A group of privileges, of Milvus 2.5 and newer, is granted by another request only.
            with suppress(*REFUSALS):
                if not is_denied(error):
                    client.grant_privilege_v2(
                        grant.role, grant.privilege, collection, db_name=database
                    )
                    continue
            refused.append(grant)
    return refused
