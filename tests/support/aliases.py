"""Aliases of corrected collections, which a refresh moves to its copy."""


def aliased(store, collection):
    """Let an alias lead to a collection, and return it."""
    alias = f"{collection}_live"
    store.point_alias(alias, collection)
    return alias
