"""Pages and charts: the report of `tune` and `diagnose`, the explanation of a hub."""
