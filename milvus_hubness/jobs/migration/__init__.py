"""The migration of a live collection: plan, prepare, copy, compare, verify, cut over."""
