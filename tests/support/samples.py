"""Sampled queries of a collection, put there at once."""

import time

from milvus_hubness.jobs.common.samples import sampling_of
from milvus_hubness.jobs.store.records import Sample, SamplesOf


def put_queries(store, collection, queries):
    """Store queries (m, d) as if clients had sampled them now, in the first m places."""
    info = store.info(collection)
    sampling = sampling_of(info)
    now = int(time.time())
    samples = [Sample(place, place, now, query) for place, query in enumerate(queries)]
    store.put_query_samples(SamplesOf(sampling.helper, info.collection_id), samples)
