"""T written out, in float64."""

import numpy as np


def transformation(adaptation, which):
    """(d, d) the T of one query."""
    U, V = (part[which].detach().double().numpy() for part in (adaptation.U, adaptation.V))
    static = adaptation.static
    return U.T @ V + (
        np.eye(U.shape[1]) if static is None else static.map.detach().double().numpy()
    )


def cosines(adaptation, items):
    """(m, c) cos(q', T r) for items (c, d), pair by pair."""
    rows = []
    for which, query in enumerate(adaptation.query.detach().double().numpy()):
        T = transformation(adaptation, which)
        rows.append(
            [query @ T @ r / (np.linalg.norm(query) * np.linalg.norm(T @ r)) for r in items]
        )
    return np.array(rows)
