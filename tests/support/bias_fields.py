"""Milvus collections whose rows have fields for biases before they are corrected."""

from pymilvus import DataType

from milvus_hubness.correction.codec.base import EPOCH_FIELD
from milvus_hubness.correction.codec.fields import SLOT_FIELDS
from tests.support.galleries import plain_collection


def with_bias_fields(client, name, items, metric, **options):
    """As plain_collection, with zeros for biases in every row. options: of their fields."""
    fields = [(field, DataType.FLOAT, options) for field in SLOT_FIELDS]
    fields.append((EPOCH_FIELD, DataType.INT64, options))
    zeros = {**dict.fromkeys(SLOT_FIELDS, 0.0), EPOCH_FIELD: 0}
    plain_collection(client, name, items, metric, fields=fields, values=zeros)
