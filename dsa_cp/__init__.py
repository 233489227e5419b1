"""Context parallelism for DeepSeek sparse attention: token shards and local-token metadata. Filled by the DSA-CP work; empty in this release."""
