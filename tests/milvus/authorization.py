"""Users with exactly the rights that they are given, on a Milvus 2.3.5, and what requests ask for."""

from __future__ import annotations

import base64
import contextlib
import itertools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import grpc
from pymilvus import MilvusClient
from pymilvus.grpc_gen import common_pb2, milvus_pb2, milvus_pb2_grpc

from milvus_hubness import HubnessClient, MilvusStore, connect
from tests.support.servers import MilvusServer

ALL = "*"
Rights = Mapping[str, set[str]]
"""Privileges by collection or alias; those of a whole database by `ALL`."""

GLOBAL = {
    "CreateAlias", "CreateCollection", "DescribeCollection", "DropAlias", "DropCollection",
    "ManageOwnership", "RenameCollection", "SelectOwnership", "ShowCollections",
}  # fmt: skip
"""The privileges that Milvus 2.3.5 grants for all collections only."""

OF_2_3_5 = {"GetLoadState": "Load"}
"""The privileges that Milvus 2.3.5 asks for in place of those that pymilvus's protocol names."""

_numbers = itertools.count()
OF_ALL = {"DescribeCollection", "IndexDetail", "ShowCollections"}
"""The privileges of the role `public`, which all users have."""

METHODS = {
    "Load": "LoadCollection",
    "IndexDetail": "DescribeIndex",
    "ManageOwnership": "OperatePrivilege",
    "SelectOwnership": "SelectRole",
}
"""The requests that need a privilege of another name."""

GRANTED_SECONDS = 60
PASSWORD = "exactly-these"
ONE_RIGHT = re.compile(r"`([^`]+)`: ((?:`\w+`(?:, )?)+)")


def rights_in(cell: str) -> dict[str, set[str]]:
    """Return the rights that a cell of the page names: "`products`: `Search`, `Query`; `*`: `Load`"."""
    rights: dict[str, set[str]] = {}
    for collection, names in ONE_RIGHT.findall(cell):
        rights.setdefault(collection, set()).update(re.findall(r"\w+", names))
    return rights


@dataclass(frozen=True)
class User:
    """A user of the server."""

    uri: str
    token: str

    def client(self) -> HubnessClient:
        return HubnessClient(self.uri, token=self.token, state_ttl=0.0)

    def store(self) -> MilvusStore:
        return MilvusStore(connect(self.uri, token=self.token))


class Authorized:
    """A server with authorization.

    Make its users before anything is dropped: Milvus 2.3.5 tells its proxy of new rights and waits for the garbage of
    dropped collections in one queue, which it works off at random. Users have what all users have, too: `OF_ALL`.
    """

    def __init__(self, uri: str) -> None:
        self.root = User(uri, MilvusServer.ROOT)
        self.plain = MilvusClient(uri, token=MilvusServer.ROOT)

    def user(self, rights: Rights) -> User:
        """Return a new user with these rights."""
        name = f"exact_{next(_numbers)}"
        self.plain.create_user(name, PASSWORD)
        self.plain.create_role(name)
        self.plain.grant_role(name, name)
        granted = [
            ("Global" if privilege in GLOBAL else "Collection", privilege, collection)
            for collection, privileges in rights.items()
            for privilege in sorted(privileges)
        ]
        for right in granted:
            self.plain.grant_privilege(name, *right)

        user = User(self.root.uri, f"{name}:{PASSWORD}")
        _wait_granted(user, granted)
        return user

    def clean(self) -> None:
        for name in self.plain.list_collections():
            for alias in self.plain.describe_collection(name)["aliases"]:
                self.plain.drop_alias(alias)
            self.plain.drop_collection(name)


def _wait_granted(user: User, granted: Sequence[tuple[str, str, str]]) -> None:
    """Wait until the server has heard of all rights.

    The requests that are asked for it are incomplete, so that they change nothing.
    """
    # pymilvus would share its connection with the clients of the test.
    identity = (("authorization", base64.b64encode(user.token.encode()).decode()),)
    deadline = time.monotonic() + GRANTED_SECONDS
    with grpc.insecure_channel(urlsplit(user.uri).netloc) as channel:
        stub = milvus_pb2_grpc.MilvusServiceStub(channel)
        for _, privilege, collection in granted:
            method = METHODS.get(privilege, privilege)
            request = getattr(milvus_pb2, f"{method}Request")()
            _name(request, collection)
            ask = partial(getattr(stub, method), request, metadata=identity, timeout=30)
            while _is_denied(ask):
                assert time.monotonic() < deadline, f"{privilege} on {collection} is not granted"
                time.sleep(0.05)


def _name(request: Any, collection: str) -> None:
    fields = request.DESCRIPTOR.fields_by_name
    if "collection_names" in fields:
        request.collection_names.append(collection)
    elif "collection_name" in fields:
        request.collection_name = collection


def _is_denied(ask: Callable[[], Any]) -> bool:
    try:
        ask()
    except grpc.RpcError as error:
        return error.code() == grpc.StatusCode.PERMISSION_DENIED
    return False


def _right_of(request: Any) -> tuple[str, str] | None:
    """Return the privilege that a request needs, and on what; None if it needs none."""
    declared = request.DESCRIPTOR.GetOptions().Extensions[common_pb2.privilege_ext_obj]
    if not declared.object_privilege:
        return None
    name = common_pb2.ObjectPrivilege.Name(declared.object_privilege)
    privilege = name.removeprefix("Privilege")
    if declared.object_name_index < 0:
        return privilege, ALL
    if declared.object_name_indexs:
        [collection] = request.collection_names
        return privilege, collection
    return privilege, request.collection_name


@contextlib.contextmanager
def requested(monkeypatch: Any) -> Iterator[dict[str, set[str]]]:
    """Yield what the requests of new connections need, by what pymilvus's protocol declares."""
    rights: dict[str, set[str]] = defaultdict(set)

    class Recording(milvus_pb2_grpc.MilvusServiceStub):
        def __init__(self, channel: Any) -> None:
            super().__init__(channel)
            for name, call in list(vars(self).items()):
                setattr(self, name, Recorded(call))

    class Recorded:
        def __init__(self, call: Any) -> None:
            self._call = call

        def _note(self, *args: Any, **options: Any) -> None:
            if right := _right_of(options["request"] if "request" in options else args[0]):
                privilege, collection = right
                rights[collection].add(privilege)

        def __call__(self, *args: Any, **options: Any) -> Any:
            self._note(*args, **options)
            return self._call(*args, **options)

        def future(self, *args: Any, **options: Any) -> Any:
            self._note(*args, **options)
            return self._call.future(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(milvus_pb2_grpc, "MilvusServiceStub", Recording)
        yield rights


def on_2_3_5(rights: Rights) -> dict[str, set[str]]:
    """Return the rights for which Milvus 2.3.5 asks where pymilvus's protocol names these."""
    return {
        name: {OF_2_3_5.get(privilege, privilege) for privilege in privileges}
        for name, privileges in rights.items()
    }
