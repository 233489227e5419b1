"""Cached context of MLA prefills, read chunk by chunk through a workspace.

``size`` says how large the workspace is and what a step needs beside it, ``plan`` which tokens a chunk holds, ``context``
gathers the chunks and merges what attention makes of them.
``python -m mla_workspace`` compares the plans.
"""
