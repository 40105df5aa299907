"""The names of `milvus_hubness.extending`: for type checkers, and for `extending.py`.

Whoever moves a definition edits its import here. The linter sees to it that `__all__` has each of them.
"""

from milvus_hubness.basics.bounds import (
    FrozenModel,
    read_value,
)
from milvus_hubness.basics.defaults import (
    REBUILD_ROWS,
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
from milvus_hubness.cli.command_line import (
    command_line,
)
from milvus_hubness.cli.console import (
    REFUSED as EXIT_REFUSED,
)
from milvus_hubness.cli.console import (
    TERMINATED as EXIT_TERMINATED,
)
from milvus_hubness.cli.console import (
    progress_bars,
    show_facts,
    show_json,
    show_result,
)
from milvus_hubness.cli.console import (
    run as run_command_line,
)
from milvus_hubness.cli.enable import (
    show_enable_plan,
    show_enabled,
)
from milvus_hubness.cli.migrate.run import (
    to_resume as migration_to_resume,
)
from milvus_hubness.cli.migrate.show import (
    migration_words,
)
from milvus_hubness.cli.migrate.show import (
    show_plan as show_migration_plan,
)
from milvus_hubness.cli.options import (
    AsJson,
    BankOptions,
    ClientTtl,
    EstimatorOptions,
    JudgingOptions,
    Kind,
    PriorOptions,
    Queries,
    RowsPerSecond,
    read_vectors,
)
from milvus_hubness.cli.refresh import (
    show_refresh,
)
from milvus_hubness.cli.reports import (
    status_words,
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
    remember_secrets,
    secrets_in,
)
from milvus_hubness.jobs.common.inputs import (
    read_bank,
)
from milvus_hubness.jobs.common.lease import (
    Lease,
    lease_on,
    leasing,
)
from milvus_hubness.jobs.common.lease import (
    holder_of as lease_holder,
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
from milvus_hubness.jobs.migration.clean import (
    would_drop,
)
from milvus_hubness.jobs.migration.ledger import (
    Ledger as MigrationLedger,
)
from milvus_hubness.jobs.migration.ledger import (
    Migration,
)
from milvus_hubness.jobs.refresh.sweep import (
    Leftovers,
    leftovers,
    sweep,
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
    Commands,
    Helper,
    expect_copy,
    expect_helper,
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
    "EXIT_REFUSED",
    "EXIT_TERMINATED",
    "IDENTITY_PROPERTY",
    "LEDGER",
    "PENDING",
    "REBUILD_ROWS",
    "SLOT_FIELDS",
    "SMALLEST",
    "SPACING",
    "STATE_REMEDY",
    "STATE_TTL",
    "WRITE_INTENTS_OF_PROPERTY",
    "WRITE_INTENTS_PROPERTY",
    "AsJson",
    "Ask",
    "BankCache",
    "BankGenerations",
    "BankLike",
    "BankOptions",
    "BankReference",
    "Batch",
    "CachedBank",
    "ClientTtl",
    "CollectionId",
    "CollectionInfo",
    "CollectionState",
    "Commands",
    "Compute",
    "DemoPair",
    "Dtype",
    "DualWrite",
    "Estimator",
    "EstimatorOptions",
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
    "JudgingOptions",
    "Key",
    "Kind",
    "Lease",
    "LeaseEntry",
    "LeasePolicy",
    "LeavesKeys",
    "Leftovers",
    "Made",
    "Metric",
    "Migration",
    "MigrationLedger",
    "MultiVectors",
    "Note",
    "Operation",
    "Pause",
    "Prior",
    "PriorOptions",
    "Profile",
    "Progress",
    "Queries",
    "QueryBank",
    "QuerySamples",
    "QuerySampling",
    "Record",
    "Renaming",
    "Reranker",
    "RowBiases",
    "RowCodec",
    "RowsPerSecond",
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
    "command_line",
    "decode_vectors",
    "demo_pairs",
    "demo_words",
    "described_property",
    "drive",
    "drive_async",
    "expect_arguments",
    "expect_copy",
    "expect_factor",
    "expect_helper",
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
    "lease_holder",
    "lease_on",
    "leasing",
    "leftovers",
    "log",
    "logger_of",
    "migration_to_resume",
    "migration_words",
    "name_some",
    "naming_extras",
    "needs_rows",
    "owner_in",
    "packed_vectors",
    "progress_bars",
    "read_bank",
    "read_states",
    "read_value",
    "read_vectors",
    "redacted",
    "remember_secrets",
    "require_state",
    "run_command_line",
    "secrets_in",
    "show_enable_plan",
    "show_enabled",
    "show_facts",
    "show_json",
    "show_migration_plan",
    "show_refresh",
    "show_result",
    "silent",
    "slots_for",
    "spread_for",
    "status_words",
    "storage_format_of",
    "sweep",
    "taken_keys",
    "unit_directions",
    "validated_bank",
    "wait_seconds",
    "wait_until",
    "with_columns",
    "would_drop",
]
