"""Rows and queries to and from augmented vectors. NumPy only, no I/O.

    vector   < r or r/‖r‖ , [u, v]   , [kinds] , f·slot_0 … f·slot_{S−1}   , 0 … 0 , [hints] >
    query    < q or q/‖q‖ , [0, −4s] , [kinds] , 0 … −w/f at one slot … 0  , 0 … 0 , [0 … 0] >

    hints    the locality hint columns, and the graph hint column a − p·b − g·½‖r‖²

The width is a multiple of 16. The columns in brackets are parts that a layout may have, see
`codec.parts`: only L2 has u and v.

Metrics. Every metric becomes an inner product (the reduction of Bachrach et al., RecSys 2014,
section 3): IP unchanged, COSINE on unit vectors, L2 as −½‖q−r‖² = q·r − ½‖r‖² − ½‖q‖² with ½‖r‖²
in its own column v.

L2 measures r and q from a mean c of the gallery (see `codec.arrays`), and v = (½‖r − c‖² − m′)/4s,
where m′ is a typical half square. o is the part of the mean that stored rows contain. In the
equations below r is the stored row, and an inner product exceeds its score by o·(q − c).

Links under L2. A graph index links the items by the inner products among themselves, in which v is
too small to count. With h = ½‖r‖², a typical half square h₀, m = h₀ + s² and u = (h − m)/s these
are

    r·r' + (h − m)(h' − m)/s²  =  −½‖r−r'‖² + (h − h₀)(h' − h₀)/s² + a constant.

This is the order of the L2 index itself, up to a term that vanishes as s grows. With m = 0 and
s = 1 the graph links everything to the longest items instead. Queries have 0 in the column of u,
because m is far larger than the half squares by which neighbours differ.

Index hints. Queries have 0 in the graph hint column, where b is the mean of the slots, and g is 0
unless the lengths of items vary under IP. With λ = a·p and κ = a·g this column adds

    −λ(b + b') − κ(½‖r‖² + ½‖r'‖²) + (p·b + g·½‖r‖²)(p·b' + g·½‖r'‖²) + a constant

to the inner products of stored vectors, so that the neighbours of an item are those that a
corrected search with this item as the query finds. Queries also have 0 in the locality hint
columns.

Lengths under IP. If lengths vary, a is several lengths of an item, so that the third term is small.
With κ = 1 the links would be those of L2, as with a column √(M² − ‖r‖²) (Bachrach et al.), but
there is no M that a later row can exceed; the term of a much longer row is at most a. A tenth of it
is enough: without it, all links lead to the longest items, which corrected searches find less
often. The slots add b·b' each, which is largest among the items that corrected searches avoid, so
biases are stored smaller and sent with a larger weight (`BiasSlots.scale`).

`codec.index_hints` describes these columns and chooses the constants; benchmarks/l2_graph.py,
benchmarks/graph_hint.py and benchmarks/lengths.py measure their effect.
"""
