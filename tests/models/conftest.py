"""The helper module of this folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# pytest's importlib mode puts no test folder on the path.
spec = importlib.util.spec_from_file_location("parity_needle", Path(__file__).parent / "needle.py")
assert spec and spec.loader
sys.modules["parity_needle"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
