"""Context parallelism for DeepSeek sparse attention: token shards and local-token metadata.

Empty in this release: the DSA-CP backend will fill it.
"""
