"""Milvus collections whose rows have fields for biases before they are corrected."""

import numpy as np
from pymilvus import DataType

from milvus_hubness.correction.codec.base import BIAS_FIELD, EPOCH_FIELD
from milvus_hubness.correction.codec.fields import SLOT_FIELDS
from milvus_hubness.correction.codec.second_vector import SECOND_VECTOR_FIELD
from tests.support.galleries import plain_collection

WIDTH = 16
"""Of augmented vectors of 10 to 14 dimensions under IP and COSINE."""

TWO_FIELDS = {"running": ["lite", "server-current"]}
"""Databases that hold two vector fields, for a module's MADE: Milvus 2.3.5 holds one."""


def with_bias_fields(client, name, items, metric, **options):
    """As plain_collection, with zeros for biases in every row. options: of their fields."""
    fields = [(field, DataType.FLOAT, options) for field in SLOT_FIELDS]
    fields.append((EPOCH_FIELD, DataType.INT64, options))
    zeros = {**dict.fromkeys(SLOT_FIELDS, 0.0), EPOCH_FIELD: 0}
    plain_collection(client, name, items, metric, fields=fields, values=zeros)


def width_for(metric):
    """The width of augmented vectors of 10 to 14 dimensions."""
    return 32 if metric == "L2" else WIDTH


def with_second_field(client, name, items, metric, width, **index):
    """As plain_collection, with a second vector field of zeros: Milvus Lite cannot add it later.

    index: index_type and params of the first field.
    """
    fields = [
        (SECOND_VECTOR_FIELD, DataType.FLOAT_VECTOR, {"dim": width}),
        (BIAS_FIELD, DataType.FLOAT, {"default_value": 0.0}),
        (EPOCH_FIELD, DataType.INT64, {"default_value": 0}),
    ]
    zeros = {SECOND_VECTOR_FIELD: np.zeros(width, np.float32)}
    plain_collection(client, name, items, metric, fields=fields, values=zeros, **index)
