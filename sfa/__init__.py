"""Index arithmetic of sparse flash attention: top-k, DCP remap, packed rows. Filled by the ASCEND_SFA work; empty in this release."""
