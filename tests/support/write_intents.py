"""A corrected collection whose rows a job rewrites while clients write, and its write-intent log."""

import contextlib

import numpy as np
from pymilvus import DataType, MilvusClient

from milvus_hubness import NNN, CorrectionConfig, QueryBank
from milvus_hubness.jobs.common.lease import Lease
from milvus_hubness.jobs.common.row_writer import rewriting
from tests.support.galleries import all_keys, plain_collection, vectors

DIM, ITEMS, BANK, K = 10, 60, 30, 4


class Written:
    """A corrected collection that a job rewrites, and an ordinary one to which the same is done."""

    field, key_field = "vector", "id"

    def __init__(self, backend, metric="IP"):
        self.backend, self.metric, self.rng = backend, metric, np.random.default_rng(83)
        self.items, self.bank = vectors(self.rng, ITEMS, DIM), vectors(self.rng, BANK, DIM)
        self.plain, self.store = backend.client(), backend.store()
        self.name, self.twin = backend.name("noted"), backend.name("twin")
        self.client = backend.hubness_client()
        self.make()

    def make(self):
        plain_collection(self.plain, self.twin, self.items, self.metric)
        schema = MilvusClient.create_schema(enable_dynamic_field=True)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=DIM)
        schema.add_field("group", DataType.INT64)
        self.create(schema)
        self.client.insert(self.name, self.rows(range(ITEMS), self.items, "n"))

    def create(self, schema, **options):
        index = MilvusClient.prepare_index_params(
            self.field, index_type="FLAT", metric_type=self.metric
        )
        self.client.create_collection(
            self.name,
            schema=schema,
            index_params=index,
            hubness=CorrectionConfig(QueryBank(self.bank), NNN(K)),
            consistency_level="Strong",
            **options,
        )

    def rows(self, keys, items=None, note="new "):
        keys = list(keys)
        items = vectors(self.rng, len(keys), DIM) if items is None else items
        return [
            {"id": key, "vector": vector, "group": key % 5, "note": f"{note}{key}"}
            for key, vector in zip(keys, items, strict=True)
        ]

    @contextlib.contextmanager
    def rewriting(self, **options):
        info = self.store.info(self.name)
        options = {"client_ttl": 0.0, **options}
        with (
            Lease(self.store, self.name) as lease,
            rewriting(lease, info, info.state, **options) as writer,
        ):
            yield writer

    def rewrite(self, writer, meanwhile=lambda: None, partition=None, keys=None):
        """Read and write rows as a job does that changes biases, but without the change.

        meanwhile: called between the read and the write. Return the number of repaired rows.
        """
        keys = all_keys(self.store, self.name, partition) if keys is None else keys
        batch = self.store.get(self.name, keys, self.field, partition=partition)
        meanwhile()
        already_repaired = writer.repaired
        writer.rewrite(batch, [self.field], partition)
        return writer.repaired - already_repaired

    def both(self, method, **arguments):
        """The same done to both collections."""
        result = getattr(self.plain, method)(self.twin, **arguments)
        got = getattr(self.client, method)(self.name, **arguments)
        if method != "delete":
            assert got == result
        assert type(got) is type(result)

    def held(self, client, name):
        """By key, the rows as `client` shows them, and how many there are."""
        options = {"output_fields": ["*"], "limit": 1_000, "consistency_level": "Strong"}
        read = client.query(name, filter="", **options)
        return {row[self.key_field]: row for row in read}, len(read)

    def assert_equal(self):
        (here, count), (there, _) = (
            self.held(self.client, self.name),
            self.held(self.plain, self.twin),
        )
        assert sorted(here) == sorted(there)
        assert count == len(here), "rows are there twice"
        for key, row in here.items():
            vector = row.pop(self.field)
            np.testing.assert_allclose(vector, there[key].pop(self.field), rtol=2.0**-22)
            assert row == there[key]

    def intent_logs(self):
        """How many rows each collection of its write-intent logs holds."""
        names = [
            name
            for name in self.plain.list_collections()
            if name.startswith(f"{self.name}__write_intents")
        ]
        return {name: self.store.count(name) for name in names}

    @property
    def empty(self):
        """Its write-intent logs between two jobs."""
        return self.log_holds(0)

    def log_holds(self, rows):
        """The only write-intent log, and so many rows in each of its collections."""
        [intent_log] = self.store.intent_logs(
            self.store.info(self.name, counted=False).collection_id
        )
        return {intent_log.collection: rows, intent_log.rows: rows}

    def announced(self):
        return self.store.info(self.name).intent_log
