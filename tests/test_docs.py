"""Generated documents are up to date, and the documents name what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_generated_documents_are_current():
    run = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate_docs.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout


def test_links_between_documents_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_paths_in_the_architecture_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = "npu_ops|vllm_plugin|cuda_fallback|tests|benchmarks|dsa_cp|sfa|sleep_mode|mla_workspace|planner"
    for path in re.findall(rf"`((?:{rooms})/[\w./]*)`", text):
        assert (ROOT / path).exists(), path
