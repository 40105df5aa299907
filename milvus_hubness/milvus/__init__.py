"""All that speaks to Milvus: the store of the jobs, the client, and the proxy."""
