"""Milvus collections that a client has created corrected, for tests that are not about a job: a migration takes six
times the CPU time."""

from milvus_hubness import NNN, CorrectionConfig, HubnessClient, QueryBank
from tests.support.galleries import plain_collection
from tests.support.recipes import as_recipe


def born(backend, items, bank, metric="IP", **options):
    """Return the name of a collection like that of `plain_collection` that is corrected from its first row on.

    options: those of `create_corrected`.
    """
    name, client = backend.name("born"), backend.client(HubnessClient)
    create_corrected(client, name, items, bank, metric, **options)
    client.close()
    return name


def create_corrected(
    client,
    name,
    items,
    bank,
    metric,
    *,
    estimator=None,
    index_type="FLAT",
    params=None,
    **correction,
):
    """Have a HubnessClient create and fill it.

    estimator: by default NNN(8). correction: further fields of CorrectionConfig.
    """
    hubness = CorrectionConfig(
        **as_recipe(QueryBank.of(bank), estimator=estimator or NNN(8), verdict="skip", **correction)
    )
    plain_collection(
        client, name, items, metric, index_type=index_type, params=params, hubness=hubness
    )
