"""The store of the jobs on Milvus."""
