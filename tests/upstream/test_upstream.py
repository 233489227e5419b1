"""vLLM's own tests against this plugin: allow_list.yaml says which, and with exactly which result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

HERE = Path(__file__).resolve().parent
FETCH = HERE.parent.parent / "tools" / "fetch_upstream_tests.py"
# One process runs the whole list of a platform, and the first test waits for it; the download may come before.
pytestmark = pytest.mark.timeout(1200)
PLUGINS = {
    "ours": ("vllm_add_dummy_stat_logger", "vllm_add_dummy_endpoint_plugin"),
    "dummy": ("vllm_add_dummy_platform",),
}


@dataclass(frozen=True)
class Entry:
    """One entry of the list; its fields are explained there."""

    file: str
    reason: str
    status: str
    count: int
    tests: tuple[str, ...] = ()
    skipped: int = 0
    why: str = ""
    platform: str = "ours"

    def __post_init__(self) -> None:
        assert self.status in ("pass", "xfail"), f"{self.file}: status {self.status!r}"
        assert self.platform in PLUGINS, f"{self.file}: platform {self.platform!r}"
        assert self.why or (self.status == "pass" and not self.skipped), f"{self.file}: an xfail or a skip needs its `why`"

    @property
    def id(self) -> str:
        return f"{Path(self.file).stem}-{self.status}" + ("" if self.platform == "ours" else f"-{self.platform}")

    def names(self, test: str) -> bool:
        """Whether ``tests`` has this test, by its full name or by its function's."""
        return test in self.tests or test.partition("[")[0] in self.tests


@dataclass(frozen=True)
class Exclusion:
    """A file, or some tests of one, that the list leaves out."""

    file: str
    why: str
    tests: tuple[str, ...] = ()


def _load() -> tuple[list[Entry], list[Exclusion]]:
    document = yaml.safe_load((HERE / "allow_list.yaml").read_text())
    for item in (*document["entries"], *document["excluded"]):
        item["tests"] = tuple(item.get("tests", ()))
    return [Entry(**item) for item in document["entries"]], [Exclusion(**item) for item in document["excluded"]]


ENTRIES, EXCLUDED = _load()


@dataclass(frozen=True)
class Result:
    """How one test of vLLM ended: passed, failed or skipped, and why."""

    file: str
    name: str
    outcome: str
    message: str


Run = Callable[[str], list[Result]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The results of a platform's whole list, run once."""
    fetched = subprocess.run([sys.executable, FETCH], check=False, capture_output=True, text=True)
    assert not fetched.returncode, fetched.stderr
    tree = Path(fetched.stdout.strip())
    hub = _write_hub(tmp_path_factory.mktemp("hub"))

    @cache
    def run(platform: str) -> list[Result]:
        return _run(platform, tree, hub, tmp_path_factory.mktemp(platform) / "results.xml")

    return run


def _write_hub(folder: Path) -> Path:
    """A Hugging Face cache that holds the configurations of models.yaml and nothing else."""
    commit = "0" * 40
    for name, config in yaml.safe_load((HERE / "models.yaml").read_text()).items():
        model = folder / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(config))
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(commit)
    return folder


def _targets(platform: str) -> list[str]:
    """pytest's arguments: whole files less what is excluded, and the named tests of files of which no more is listed."""
    entries = [entry for entry in ENTRIES if entry.platform == platform]
    whole = {entry.file for entry in entries if not entry.tests}
    named = [f"{entry.file}::{test}" for entry in entries if entry.file not in whole for test in entry.tests]
    left_out = [f"--deselect={item.file}::{test}" for item in EXCLUDED if item.file in whole for test in item.tests]
    return [*sorted(whole), *named, *left_out]


def _run(platform: str, tree: Path, hub: Path, report: Path) -> list[Result]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment |= {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    if platform == "ours":
        environment["VLLM_NPU_PARITY_DEVICE"] = "cpu"
    folders = [tree / "site", HERE, *(tree / "plugins" / name for name in PLUGINS[platform])]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    command = [
        *(sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", "-p", "no:cacheprovider"),
        *("-p", "vllm_process", "-q", "--tb=short", "--timeout", "200"),
        *("--junitxml", str(report), "-o", "junit_family=xunit1"),
        *_targets(platform),
    ]
    done = subprocess.run(command, check=False, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), f"vLLM's tests did not run to the end:\n{(done.stdout + done.stderr)[-4000:]}"
    return [_result(case) for case in ElementTree.parse(report).iter("testcase")]


def _result(case: ElementTree.Element) -> Result:
    outcomes = {child.tag: child.get("message") or "" for child in case if child.tag in ("failure", "error", "skipped")}
    outcome = "passed" if not outcomes else "skipped" if set(outcomes) == {"skipped"} else "failed"
    return Result(case.get("file") or "", case.get("name") or "", outcome, " ".join(outcomes.values()))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_upstream(entry: Entry, results: Run) -> None:
    named = [other for other in ENTRIES if other.tests and (other.file, other.platform) == (entry.file, entry.platform)]

    def belongs(result: Result) -> bool:
        if entry.tests:
            return entry.names(result.name)
        return not any(other.names(result.name) for other in named)

    mine = [result for result in results(entry.platform) if result.file == entry.file and belongs(result)]
    expected = {"pass": "passed", "xfail": "failed"}[entry.status]
    strange = [result for result in mine if result.outcome not in (expected, "skipped")]
    lines = [f"{result.outcome}: {result.file}::{result.name} {result.message[:200]}" for result in strange]
    assert not strange, f"expected: {entry.status}\n" + "\n".join(lines)
    counts = Counter(result.outcome for result in mine)
    assert (counts[expected], counts["skipped"]) == (entry.count, entry.skipped), (
        f"{entry.file}: expected {entry.count} {expected} and {entry.skipped} skipped, got {dict(counts)}"
    )


def test_list_is_consistent() -> None:
    """One whole-file entry to a file at most, nothing both listed and excluded, a reason for every exclusion."""
    whole = [(entry.file, entry.platform) for entry in ENTRIES if not entry.tests]
    assert len(whole) == len(set(whole))
    listed = {(entry.file, test) for entry in ENTRIES for test in entry.tests or ("",)}
    assert not listed & {(item.file, test) for item in EXCLUDED for test in item.tests or ("",)}
    assert all(item.why for item in EXCLUDED)
