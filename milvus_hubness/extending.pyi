"""The names of `milvus_hubness.extending`: for type checkers, and for `extending.py`.

Whoever moves a definition edits its import here. `__all__` says of each name why an extension needs it.
"""

from milvus_hubness.basics.bounds import FrozenModel
from milvus_hubness.basics.defaults import STATE_TTL
from milvus_hubness.basics.logs import log
from milvus_hubness.basics.progress import Progress
from milvus_hubness.basics.waiting import Standing, WaitPolicy, wait_seconds, wait_until
from milvus_hubness.basics.words import expect_arguments
from milvus_hubness.clients.biases import BankBiases
from milvus_hubness.clients.states import CachedCollection, CachedStates
from milvus_hubness.clients.steps import Ask, Compute, Operation, Pause, drive, drive_async
from milvus_hubness.correction.banks.bank import Vectors
from milvus_hubness.correction.banks.stored import Key, StoredBank
from milvus_hubness.correction.codec.arrays import (
    ALIGNMENT,
    Dtype,
    Floats,
    StorageFormat,
    same_directions,
)
from milvus_hubness.correction.codec.arrays import packed as packed_vectors
from milvus_hubness.correction.codec.base import PENDING, RowCodec
from milvus_hubness.correction.codec.beside import NUMBER_KEYS, SLOT_KEYS
from milvus_hubness.correction.codec.multi_vectors import MultiVectorFormat
from milvus_hubness.correction.estimators.base import FitInputs
from milvus_hubness.correction.items import Items
from milvus_hubness.correction.overrides import Overrides
from milvus_hubness.correction.rerank import Adaptive as Reranker
from milvus_hubness.correction.state import (
    BankReference,
    CollectionState,
    Profile,
    read_states,
)
from milvus_hubness.demo.run import Pair as DemoPair
from milvus_hubness.demo.run import collect as demo_pairs
from milvus_hubness.errors import did_you_mean, name_some, redacted, secrets_in
from milvus_hubness.jobs.common.progress import Event, Events
from milvus_hubness.jobs.store.generations import BankGenerations, Batch, Made
from milvus_hubness.jobs.store.helpers import HelperLists
from milvus_hubness.jobs.store.ownership import LEDGER, CollectionId
from milvus_hubness.jobs.store.protocols import (
    BiasKeys,
    ClientFeatures,
    Renaming,
    SideCollections,
    Store,
)
from milvus_hubness.jobs.store.records import (
    CollectionInfo,
    ColumnNeeds,
    DualWrite,
    Fences,
    Record,
    VectorField,
    identity_in,
    is_fence,
    taken_keys,
)
from milvus_hubness.milvus.row_form import RowForm

__all__ = [  # noqa: RUF022 - by what they are for
    # -- A store
    # All methods that jobs need of a database.
    "Store",
    # Optional: collections can be renamed.
    "Renaming",
    # Optional: biases under keys of rows that have no schema.
    "BiasKeys",
    # Optional: biases in a collection of their own.
    "SideCollections",
    # Optional: clients of the database gate searches, or watch their writes for hubs.
    "ClientFeatures",
    # Banks on any database: a store inherits them.
    "BankGenerations",
    # The helper collections of a collection, listed and verified: a store inherits it.
    "HelperLists",
    # -- What a store exchanges with jobs
    # A collection as jobs see it: `Store.info` returns it.
    "CollectionInfo",
    # A vector field of a collection, with its index.
    "VectorField",
    # What an index asks of augmented vectors: `Store.column_needs`.
    "ColumnNeeds",
    # Rows that a store reads and writes.
    "Batch",
    # The key of a row, a number or a text.
    "Key",
    # What a job has to remember: `Store.put_records` takes them.
    "Record",
    # The collection with the records of jobs, which a client reads too.
    "LEDGER",
    # Where the writes of a client go too, while a migration runs.
    "DualWrite",
    # The aliases through which the holder of a lease writes: `Store.fenced` takes them.
    "Fences",
    # A store does not show the aliases of fences.
    "is_fence",
    # Which collection is meant, also after a rename.
    "CollectionId",
    # What separates it from a later one of its name, where the database numbers none.
    "identity_in",
    # Which generation of a bank is meant: a store reads and deletes its rows.
    "BankReference",
    # A bank on its way to and from a database.
    "StoredBank",
    # What `Store.save_bank` has created.
    "Made",
    # The base of all that is stored in a property: `Store.write_property` takes one.
    "FrozenModel",
    # The obstacle that users' fields have the names of hidden ones.
    "taken_keys",
    # -- What is stored
    # How a vector field is corrected: a store and a client have all else from it.
    "CollectionState",
    # A named set of biases of a field, which a query may choose.
    "Profile",
    # The states among the properties of a collection, for a client.
    "read_states",
    # What is in a stored row: a store and a client compute nothing of that themselves.
    "RowCodec",
    # The columns and the type of a stored vector, and rows to and from them.
    "StorageFormat",
    # The same of rows of several vectors.
    "MultiVectorFormat",
    # The multiple of a width at which indexes are fast: `ColumnNeeds.multiple_of`.
    "ALIGNMENT",
    # The types of vectors that can be corrected: `VectorField.dtype`.
    "Dtype",
    # Vectors and biases in float32, as a store exchanges them with jobs.
    "Floats",
    # Lists of numbers become an array in half of NumPy's time, on each insert and search.
    "packed_vectors",
    # A store that normalises vectors says whether a copy has the same ones.
    "same_directions",
    # The keys with the numbers of the generations of biases, which a store compares.
    "NUMBER_KEYS",
    # The keys with biases, which a store adds for `enable`.
    "SLOT_KEYS",
    # The epoch of a row without a bias, which a store looks for.
    "PENDING",
    # -- Waits and messages of a store
    # How far a server is with what a store waits for.
    "Standing",
    # How long a store may wait for a server that gets no further.
    "WaitPolicy",
    # A store waits for an index or an optimiser, and ends when it gets no further.
    "wait_until",
    # A store waits as long as the server asks, and says so.
    "wait_seconds",
    # A store says what it waits for, and clients what they could not do.
    "log",
    # Messages of a store show no secret.
    "redacted",
    # The secrets in the address of a store, for `redacted`.
    "secrets_in",
    # Messages name the first rows of many.
    "name_some",
    # A message names what may be meant by a mistyped name.
    "did_you_mean",
    # -- An estimator and a re-ranker
    # What the fit of an estimator gets beside the bank.
    "FitInputs",
    # What an estimator fits and scores: an array, or several vectors a row.
    "Vectors",
    # A learned stage after a search inherits from it.
    "Reranker",
    # -- A listener
    # What a listener of a migration gets.
    "Event",
    # The listeners of a migration: `MigrationOptions.events`.
    "Events",
    # A listener of long jobs: takes what is done, how much, and of how much.
    "Progress",
    # -- A client of a database
    # A method of a client without I/O: a generator of steps.
    "Operation",
    # A step of an operation: a request to the database.
    "Ask",
    # A step: long work outside the event loop.
    "Compute",
    # A step: a wait.
    "Pause",
    # Runs the operations of a synchronous client.
    "drive",
    # Runs the operations of an asynchronous client.
    "drive_async",
    # What a client remembers of a collection: a client adds what else it reads.
    "CachedCollection",
    # The states of collections that a client remembers, and attempts by them: a client inherits it.
    "CachedStates",
    # The banks that a client has in memory, within a budget, and the biases of rows by them.
    "BankBiases",
    # Keys and fields of rows, for priors and kinds: a client reads them for new rows.
    "Items",
    # A client of a database has the same default age of a cached state.
    "STATE_TTL",
    # A client refuses arguments that are misspelt.
    "expect_arguments",
    # How a query is corrected, where it says so itself.
    "Overrides",
    # -- A store of a framework
    # What a collection can hold that the store did not create.
    "RowForm",
    # -- Data of examples
    # A documented function, for examples: a question and its right answer.
    "DemoPair",
    # The data of examples, which download nothing.
    "demo_pairs",
]
