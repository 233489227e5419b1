"""Write the schemas of torch_npu's operators to tests/contract/torch_npu_schemas.json.

The test of that folder checks every call of torch_npu in this project against the file, with no torch_npu at hand. Run this
again with another version of torch_npu installed; neither an NPU nor CANN is needed. ``--check`` writes nothing and fails if
the file is not what the installed version says.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tests" / "contract" / "torch_npu_schemas.json"
NAMESPACES = ("npu::", "atb::")


def installed() -> dict[str, Any]:
    """Version of the installed torch_npu and the schemas that it registers, by operator and overload."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    sys.path.insert(0, str(ROOT))
    from npu_ops import virtual_npu

    virtual_npu.enable()
    import torch

    own = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(NAMESPACES)]
    texts = {schema.name + (f".{schema.overload_name}" if schema.overload_name else ""): str(schema) for schema in own}
    return {"torch_npu": importlib.metadata.version("torch_npu"), "schemas": dict(sorted(texts.items()))}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the file is out of date, write nothing")
    check = parser.parse_args().check
    found = installed()
    text = json.dumps(found, indent=1) + "\n"
    if check and (not TARGET.is_file() or TARGET.read_text(encoding="utf-8") != text):
        sys.exit(f"{TARGET.relative_to(ROOT)} is not that of torch_npu {found['torch_npu']}: run tools/torch_npu_schemas.py")
    if not check:
        TARGET.write_text(text, encoding="utf-8")
    print(f"torch_npu {found['torch_npu']}: {len(found['schemas'])} schemas, {len(text) // 1024} KiB")


if __name__ == "__main__":
    main()
