"""The names of `milvus_hubness.extending`: for type checkers, and for `extending.py`.

Whoever moves a definition edits its import here. The linter sees to it that `__all__` has each of them.
"""

from milvus_hubness.basics.bounds import (
    FrozenModel,
    read_value,
)
from milvus_hubness.basics.defaults import (
    STATE_TTL,
)
from milvus_hubness.basics.logs import (
    log,
)
from milvus_hubness.basics.logs import (
    named as logger_of,
)
from milvus_hubness.basics.progress import (
    Progress,
    silent,
)
from milvus_hubness.basics.requirements import (
    naming_extras,
)
from milvus_hubness.basics.waiting import (
    Standing,
    WaitPolicy,
    wait_seconds,
    wait_until,
)
from milvus_hubness.correction.banks.bank import (
    BankLike,
    QueryBank,
    Vectors,
)
from milvus_hubness.correction.banks.stored import (
    Key,
    StoredBank,
)
from milvus_hubness.correction.codec.arrays import (
    ALIGNMENT,
    SMALLEST,
    SPACING,
    Dtype,
    Floats,
    Metric,
    StorageFormat,
    as_metric,
    unit_directions,
)
from milvus_hubness.correction.codec.arrays import (
    decode as decode_vectors,
)
from milvus_hubness.correction.codec.arrays import (
    packed as packed_vectors,
)
from milvus_hubness.correction.codec.base import (
    BIAS_FIELD,
    EPOCH_FIELD,
    PENDING,
    RowBiases,
    RowCodec,
    with_columns,
)
from milvus_hubness.correction.codec.base import (
    form_of as storage_format_of,
)
from milvus_hubness.correction.codec.fields import (
    SLOT_FIELDS,
)
from milvus_hubness.correction.codec.quantisation import (
    spread_for,
)
from milvus_hubness.correction.estimators import (
    Estimator,
    FittedBias,
)
from milvus_hubness.correction.estimators.base import (
    FitInputs,
)
from milvus_hubness.correction.kernels.multi_vectors import (
    MultiVectors,
    is_multi,
)
from milvus_hubness.correction.kernels.multi_vectors import (
    joined as joined_rows,
)
from milvus_hubness.correction.kinds import (
    expect_factor,
)
from milvus_hubness.correction.prior import (
    Items,
    Prior,
)
from milvus_hubness.correction.rerank import (
    Adaptive as Reranker,
)
from milvus_hubness.correction.state import (
    REMEDY as STATE_REMEDY,
)
from milvus_hubness.correction.state import (
    BankReference,
    CollectionState,
    Profile,
    described_property,
    expect_values,
    fields_read,
    needs_rows,
    read_states,
    require_state,
    slots_for,
)
from milvus_hubness.demo.run import (
    Pair as DemoPair,
)
from milvus_hubness.demo.run import (
    collect as demo_pairs,
)
from milvus_hubness.demo.run import (
    words as demo_words,
)
from milvus_hubness.errors import (
    name_some,
    redacted,
    secrets_in,
)
from milvus_hubness.jobs.common.lease import (
    Lease,
    lease_on,
    leasing,
)
from milvus_hubness.jobs.common.lease_records import (
    Entry as LeaseEntry,
)
from milvus_hubness.jobs.common.lease_records import (
    LeasePolicy,
)
from milvus_hubness.jobs.common.progress import (
    Event,
    Events,
    Throttle,
    as_events,
)
from milvus_hubness.jobs.store.generations import (
    BANK_PROPERTY,
    BankGenerations,
    Batch,
    Made,
    fitted_bank,
)
from milvus_hubness.jobs.store.generations import (
    parts_of as bank_parts,
)
from milvus_hubness.jobs.store.generations import (
    validated as validated_bank,
)
from milvus_hubness.jobs.store.helpers import (
    HelperLists,
    expect_helpers,
)
from milvus_hubness.jobs.store.ownership import (
    LEDGER,
    WRITE_INTENTS_OF_PROPERTY,
    CollectionId,
    Helper,
    expect_copy,
    owner_in,
)
from milvus_hubness.jobs.store.protocols import (
    LeavesKeys,
    QuerySampling,
    Renaming,
    SecondVectors,
    SideCollections,
    Store,
    WholeRows,
    capability,
)
from milvus_hubness.jobs.store.records import (
    DUAL_WRITE_PROPERTY,
    IDENTITY_PROPERTY,
    WRITE_INTENTS_PROPERTY,
    CollectionInfo,
    DualWrite,
    Fences,
    Note,
    QuerySamples,
    Record,
    Sample,
    SamplesOf,
    Samplings,
    VectorField,
    Verdicts,
    WriteIntentLog,
    identity_in,
    intent_log_name,
    intent_logs_among,
    is_fence,
    taken_keys,
)
from milvus_hubness.milvus.client.messages import (
    expect_arguments,
)
from milvus_hubness.milvus.client.methods import (
    drive,
    drive_async,
)
from milvus_hubness.milvus.client.state_cache import (
    BankCache,
    CachedBank,
)
from milvus_hubness.milvus.client.steps import (
    Ask,
    Compute,
    Operation,
    Pause,
    Step,
)

__all__ = [
    "ALIGNMENT",
    "BANK_PROPERTY",
    "BIAS_FIELD",
    "DUAL_WRITE_PROPERTY",
    "EPOCH_FIELD",
    "IDENTITY_PROPERTY",
    "LEDGER",
    "PENDING",
    "SLOT_FIELDS",
    "SMALLEST",
    "SPACING",
    "STATE_REMEDY",
    "STATE_TTL",
    "WRITE_INTENTS_OF_PROPERTY",
    "WRITE_INTENTS_PROPERTY",
    "Ask",
    "BankCache",
    "BankGenerations",
    "BankLike",
    "BankReference",
    "Batch",
    "CachedBank",
    "CollectionId",
    "CollectionInfo",
    "CollectionState",
    "Compute",
    "DemoPair",
    "Dtype",
    "DualWrite",
    "Estimator",
    "Event",
    "Events",
    "Fences",
    "FitInputs",
    "FittedBias",
    "Floats",
    "FrozenModel",
    "Helper",
    "HelperLists",
    "Items",
    "Key",
    "Lease",
    "LeaseEntry",
    "LeasePolicy",
    "LeavesKeys",
    "Made",
    "Metric",
    "MultiVectors",
    "Note",
    "Operation",
    "Pause",
    "Prior",
    "Profile",
    "Progress",
    "QueryBank",
    "QuerySamples",
    "QuerySampling",
    "Record",
    "Renaming",
    "Reranker",
    "RowBiases",
    "RowCodec",
    "Sample",
    "SamplesOf",
    "Samplings",
    "SecondVectors",
    "SideCollections",
    "Standing",
    "Step",
    "StorageFormat",
    "Store",
    "StoredBank",
    "Throttle",
    "VectorField",
    "Vectors",
    "Verdicts",
    "WaitPolicy",
    "WholeRows",
    "WriteIntentLog",
    "as_events",
    "as_metric",
    "bank_parts",
    "capability",
    "decode_vectors",
    "demo_pairs",
    "demo_words",
    "described_property",
    "drive",
    "drive_async",
    "expect_arguments",
    "expect_copy",
    "expect_factor",
    "expect_helpers",
    "expect_values",
    "fields_read",
    "fitted_bank",
    "identity_in",
    "intent_log_name",
    "intent_logs_among",
    "is_fence",
    "is_multi",
    "joined_rows",
    "lease_on",
    "leasing",
    "log",
    "logger_of",
    "name_some",
    "naming_extras",
    "needs_rows",
    "owner_in",
    "packed_vectors",
    "read_states",
    "read_value",
    "redacted",
    "require_state",
    "secrets_in",
    "silent",
    "slots_for",
    "spread_for",
    "storage_format_of",
    "taken_keys",
    "unit_directions",
    "validated_bank",
    "wait_seconds",
    "wait_until",
    "with_columns",
]
