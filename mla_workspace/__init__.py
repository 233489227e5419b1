"""Chunked-context workspace of MLA: its size, its plan, the merging loop. Filled by the ASCEND_MLA work; empty in this release."""
