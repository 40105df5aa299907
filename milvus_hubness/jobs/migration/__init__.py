"""The migration of a live collection: copied in chunks, caught up, verified, cut over."""
