"""``python -m vllm_plugin``."""

from __future__ import annotations

import sys

from vllm_plugin.cli import main

if __name__ == "__main__":
    sys.exit(main())
