"""The two forms of stored nodes: that of this store, and that of LlamaIndex's own Milvus store.

No I/O.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict
from pymilvus import DataType

from llama_index_milvus_hubness.filters import (
    LOWERED,
    MATCHED,
    METADATA,
    DynamicKeys,
    Keys,
    OwnKeys,
    filtered,
)
from milvus_hubness.extending import RowForm

ID = "id"
VECTOR = "embedding"
TEXT = "text"
DOCUMENT = "doc_id"
NODE = "node"
NODE_TYPE = "node_type"
CONTENT = "_node_content"
CONTENT_TYPE = "_node_type"
OWN_TEXTS = (ID, TEXT, DOCUMENT, NODE_TYPE)
OWN_OBJECTS = (NODE, METADATA, MATCHED, LOWERED)
_VARCHAR = (DataType.VARCHAR,)
_VECTOR = (DataType.FLOAT_VECTOR,)


class Rows(Protocol):
    """How the nodes of a collection are stored."""

    vector: str
    """The field with the embeddings."""

    shown: Sequence[str]
    """The fields that `node` needs."""

    keys: Keys
    """Where the metadata is, for filters."""

    def row(self, node: BaseNode) -> dict[str, Any]:
        """Return the row of a node. Raises ValueError for a node that has none."""

    def node(self, row: Mapping[str, Any]) -> BaseNode:
        """Return the node of a row, without its embedding."""


class OwnRows:
    """Rows of a collection that this store created."""

    vector = VECTOR
    shown = (ID, TEXT, NODE, NODE_TYPE)
    keys: Keys = OwnKeys()

    def row(self, node: BaseNode) -> dict[str, Any]:
        metadata = node_to_metadata_dict(node, remove_text=True)
        return {
            ID: node.node_id,
            VECTOR: node.get_embedding(),
            TEXT: node.get_content(metadata_mode=MetadataMode.NONE),
            DOCUMENT: node.ref_doc_id or "",
            NODE: {"content": metadata[CONTENT]},
            NODE_TYPE: metadata[CONTENT_TYPE],
            **filtered(node.metadata),
        }

    def node(self, row: Mapping[str, Any]) -> BaseNode:
        metadata = {CONTENT: row[NODE]["content"], CONTENT_TYPE: row[NODE_TYPE]}
        return metadata_dict_to_node(metadata, text=row[TEXT])


class MilvusVectorStoreRows:
    """Rows of a collection that LlamaIndex's MilvusVectorStore created.

    Old versions declare the key and the vector only; text and document are dynamic fields then.
    """

    shown = (ID, TEXT, CONTENT, CONTENT_TYPE)

    def __init__(self, form: RowForm, vector: str) -> None:
        self.vector = vector
        self.keys: Keys = DynamicKeys(form)
        self._form = form

    def row(self, node: BaseNode) -> dict[str, Any]:
        stored = {
            **node_to_metadata_dict(node, remove_text=True),
            TEXT: node.get_content(metadata_mode=MetadataMode.NONE),
            ID: node.node_id,
            self.vector: node.get_embedding(),
        }
        # MilvusVectorStore overwrites such a value, so that no filter would find it.
        for key, value in node.metadata.items():
            if stored.get(key) != value:
                raise ValueError(
                    f"the metadata {key!r} of node {node.node_id!r} has the name of a field of "
                    f"collection {self._form.collection!r}: rename it"
                )
        return stored

    def node(self, row: Mapping[str, Any]) -> BaseNode:
        self._form.expect_in_row(row, [CONTENT])
        return metadata_dict_to_node(dict(row), text=row.get(TEXT))


def rows_of(form: RowForm) -> OwnRows | MilvusVectorStoreRows:
    """Return how a collection of this form holds nodes. Raises InvalidInput if it holds none.

    Only a row shows whether MilvusVectorStore wrote it: see `MARKS`.
    """
    if all(name in form.fields for name in (*OWN_TEXTS, *OWN_OBJECTS, VECTOR)):
        objects = dict.fromkeys(OWN_OBJECTS, (DataType.JSON,))
        form.expect_fields(dict.fromkeys(OWN_TEXTS, _VARCHAR) | objects | {VECTOR: _VECTOR})
        return OwnRows()

    vectors = [
        name for name, field in form.fields.items() if field["type"] == DataType.FLOAT_VECTOR
    ]
    # With a name of the user's if there is one to choose.
    vector = vectors[0] if len(vectors) == 1 else VECTOR
    form.expect_fields(
        {
            **dict.fromkeys((ID, TEXT, DOCUMENT, CONTENT, CONTENT_TYPE), _VARCHAR),
            vector: _VECTOR,
        },
        dynamic=MARKS,
    )
    return MilvusVectorStoreRows(form, vector)


MARKS = (TEXT, DOCUMENT, CONTENT, CONTENT_TYPE)
"""What each row of MilvusVectorStore has, as a dynamic field if the schema does not declare it."""
