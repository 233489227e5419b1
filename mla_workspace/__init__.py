"""Chunked-context workspace of MLA: its size, its plan, the merging loop.

Empty in this release: the ASCEND_MLA backend will fill it.
"""
