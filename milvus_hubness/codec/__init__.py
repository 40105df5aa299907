"""Rows and queries to and from augmented vectors. NumPy only, no I/O.

    stored   < r or r/‖r‖ ,  [u , v] ,  slot_0/s … slot_{S−1}/s ,  0 … 0 ,  [cells] ,  [a − p·b] >
    asked    < q or q/‖q‖ ,  [0 , −4s] ,  0 … −w·s at one slot … 0 ,  0 … 0 ,  [0 … 0] ,  [0]     >

The width is a multiple of 16; s = 1 unless L2, and u and v are for L2 alone.

Every metric becomes an inner product (the reduction of Bachrach et al., RecSys 2014, section 3):
IP as it is, COSINE on unit vectors, L2 as −½‖q−r‖² = q·r − ½‖r‖² − ½‖q‖² with ½‖r‖² on its own column v.

Rows may lie far from zero, and then ½‖r‖² loses the bits by which neighbours differ. So L2 sees r and q from
a mean c of the gallery (see `codec.arrays`), queries are sent as q − c, and v = (½‖r − c‖² − m′)/4s, m′ a
typical half square. Rows are stored with some numbers of the mean, o, where they would not come back bit for
bit without: r stands for them in what follows, and a product is above its score by o·(q − c).

A graph index links the items by the products among themselves, in which v is too small to count. With
h = ½‖r‖², a typical half square h₀, m = h₀ + s² and u = (h − m)/s these are

    r·r' + (h − m)(h' − m)/s²  =  −½‖r−r'‖² + (h − h₀)(h' − h₀)/s² + a constant,

the order of the L2 index itself, up to a term that vanishes as s grows: the stored vectors are then of nearly
equal length, on which inner product and distance agree (as in the reduction of the same paper from products
to distances). With m = 0 and s = 1 the graph links everything to the longest items instead. No query asks for
u: m is far larger than the half squares by which neighbours differ.

No query asks the graph hint column a − p·b, where b is the mean of the slots: with λ = a·p it adds

    −λ(b + b') + p²·b·b' + a constant

to the products of stored vectors. Without it the graph links items by r·r' alone, while a corrected search
looks for items of low bias, which are nobody's neighbours; with it, an item's neighbours are those that a
corrected search with the item for its query finds. Nor does any ask the locality hint columns, by which an
index keeps together what the same queries look for: see `locality_hints`. `Layout.measured_on` chooses m, s,
a and p; benchmarks/l2_graph.py and benchmarks/link.py show what they are worth."""
