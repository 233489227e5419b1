"""Fetch vLLM's own tests, which only its source distribution has, into ``.venv/upstream`` (git-ignored).

tests/upstream calls ``fetch`` itself; run this by hand to look at them. Nothing of vLLM is built or put under version
control here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

# The release whose results tests/upstream/allow_list.yaml states.
VERSION = "0.32.0"
CACHE = Path(__file__).resolve().parent.parent / ".venv" / "upstream"
# pip asks even a source distribution that it only downloads for metadata, and vLLM's needs these besides torch.
BUILD_TOOLS = ("setuptools>=77,<81", "setuptools-scm", "setuptools-rust", "wheel", "packaging", "jinja2")
# What vLLM's conftest.py and asynchronous tests import, and the example plugins that its plugin tests expect.
TEST_TOOLS = ("tblib>=3", "pytest-asyncio>=1")
EXAMPLE_PLUGINS = ("vllm_add_dummy_platform", "vllm_add_dummy_stat_logger", "vllm_add_dummy_endpoint_plugin")


def pip(*arguments: str | Path, path: Path | None = None, **variables: str) -> None:
    """Run pip quietly, with ``path`` in front of the installed packages.

    Raises:
        RuntimeError: with the end of pip's output, if it fails.
    """
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise RuntimeError(f"{tail}\n\n`pip {arguments[0]}` failed: check that pip reaches a package index (pip config list).")


def fetch() -> Path:
    """The folder with ``tests/`` of vLLM ``VERSION`` and, beside it, ``site/`` and ``plugins/<name>/`` for PYTHONPATH.

    The folder appears only once it is complete, so an interrupted run leaves nothing behind that looks finished.
    """
    target = CACHE / f"vllm-{VERSION}"
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        work = Path(scratch)
        print(f"fetching the tests of vLLM {VERSION} (45 MB) ...", file=sys.stderr, flush=True)
        pip("install", "--target", work / "build", *BUILD_TOOLS)
        # Without VLLM_VERSION_OVERRIDE pip refuses the file, because its metadata says 0.32.0+empty.
        pip("download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm", "--dest", work, f"vllm=={VERSION}",
            path=work / "build", VLLM_VERSION_OVERRIDE=VERSION, VLLM_TARGET_DEVICE="empty")  # fmt: skip
        with tarfile.open(work / f"vllm-{VERSION}.tar.gz") as archive:
            wanted = (f"vllm-{VERSION}/tests/", f"vllm-{VERSION}/pyproject.toml")  # the latter has pytest's markers
            archive.extractall(work, [item for item in archive if item.name.startswith(wanted)], filter="data")
        tree = work / f"vllm-{VERSION}"
        pip("install", "--no-deps", "--target", tree / "site", *TEST_TOOLS)
        for name in EXAMPLE_PLUGINS:
            source = tree / "tests" / "plugins" / name
            pip("install", "--no-deps", "--no-build-isolation", "--target", tree / "plugins" / name, source)
        tree.rename(target)
    return target


if __name__ == "__main__":
    print(fetch())
