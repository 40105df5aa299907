"""Which rows of a corrected collection lack something that a job or a client should have given them."""


def incomplete(state, rows):
    """Return (n,) whether a row has no bias, lacks locality hints, or is stored with another kind than it has.

    rows: as `StoredBiases.read` returns them.
    """
    codec = state.codec
    lacks = rows.unbiased.copy()
    if state.layout.locality_hints:
        held = rows.columns[codec.field][:, state.layout.locality_hint_columns]
        # Zero vectors and invalid ones have no direction that a hint could say.
        could = rows.vectors.any(axis=1) & ~state.layout.invalid(rows.vectors)
        lacks |= could & ~held.any(axis=1)
    if state.kinds is not None:
        lacks |= codec.read_kinds(rows.columns) != state.kinds.numbers_of(rows.vectors, rows.batch)
    return lacks
