"""Number formats of weights: what a folder stores, how each is declared once, and the weight type that holds one.

How a folder's tensors are read into such weights is `models.weights`' business, which of them a mesh cuts
`sharding.rules`'; what multiplies with one is `models.product`, `models.experts` and the kernels.
Read in the order `format`, which says what a declaration has; `int4`, `fp8`, `int8`, one declaration each; `known`, all
of them; `quantised`, the weight type.
"""
