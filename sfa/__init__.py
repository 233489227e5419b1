"""Index arithmetic of sparse flash attention: top-k, DCP remap, packed rows.

Empty in this release: the ASCEND_SFA backend will fill it.
"""
