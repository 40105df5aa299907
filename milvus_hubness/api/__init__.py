"""The jobs as `milvus_hubness` exports them: they take a client or an address for their store."""
