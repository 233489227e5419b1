"""Index arithmetic of sparse flash attention.

``settings`` reads what a model's configuration says of its indexer, ``sharing`` which layers score and which reuse the top-k of
an earlier one, ``remap`` turns global indices into a rank's own under decode context parallelism, ``packed`` says where the
parts of a quantised row lie.
"""
