"""The doctor: facts about this environment, checks on them, and a smoke run of each operator on each device found.

The checks come first and touch neither torch nor a device: some of what they find makes ``import torch`` itself fail.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from vllm_plugin import selection
from vllm_plugin.selection import Machine

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from npu_ops.contract import OpCase, OpContract

OK: Final = "ok"
NOTE: Final = "note"
PROBLEM: Final = "problem"
COLOURS: Mapping[str, str] = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}
DRIVER_VERSION = Path("/usr/local/Ascend/driver/version.info")
# Below $ASCEND_HOME_PATH: CANN 9, CANN 8, and the toolkit's own record.
CANN_VERSIONS = (
    "share/info/runtime/version.info",
    "compiler/version.info",
    f"{platform.machine()}-linux/ascend_toolkit_install.info",
)
SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
DISPATCH_KEYS: Mapping[str, str] = {"cpu": "CPU", "cuda": "CUDA", "npu": "PrivateUse1"}
WHY: Mapping[str, str] = {"cpu": "the reference", "cuda": "Triton kernels", "npu": "torch_npu"}
IMPORT_TIMEOUT_S = 120


@dataclass(frozen=True)
class Finding:
    """One line of the report. A problem always has a remedy."""

    name: str
    status: Literal["ok", "note", "problem"]
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """What the checks judge.

    Attributes:
        machine: devices, distributions and libraries, as the plugin itself sees them.
        environ: environment variables.
        python: release of this interpreter.
        driver: version of the Ascend driver, or None.
        cann: version of CANN, or None.
        npu_smi: path of the npu-smi tool, or None.
        registered: whether vLLM can find our entry point.
        torchvision: None if not installed, "" if it imports, else the last line of its error.
    """

    machine: Machine
    environ: Mapping[str, str]
    python: tuple[int, int]
    driver: str | None
    cann: str | None
    npu_smi: str | None
    registered: bool
    torchvision: str | None

    @classmethod
    def read(cls) -> Facts:
        """Look at this environment; a second, most of it for importing torchvision in a process of its own."""
        home = Path(os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest"))
        return cls(
            machine=Machine.read(),
            environ=dict(os.environ),
            python=sys.version_info[:2],
            driver=version_in(DRIVER_VERSION),
            cann=next((found for name in CANN_VERSIONS if (found := version_in(home / name))), None),
            npu_smi=shutil.which("npu-smi"),
            registered="vllm_plugin:register" in {e.value for e in entry_points(group="vllm.platform_plugins")},
            torchvision=_torchvision_error(),
        )


def version_in(file: Path) -> str | None:
    """Value of the line ``Version=…`` of one of Ascend's version files, or None."""
    try:
        found = re.search(r"(?im)^\s*version\s*=\s*(\S+)", file.read_text(errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def _torchvision_error() -> str | None:
    if selection.installed_version("torchvision") is None:
        return None
    command = [sys.executable, "-c", "import torchvision"]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"not imported after {IMPORT_TIMEOUT_S} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it ends the process"])[-1]


# Checks of the environment: facts in, findings out.


def check_python(facts: Facts) -> Finding:
    """The interpreter and the system."""
    here = f"{'.'.join(map(str, facts.python))} on {platform.system()} {platform.machine()}"
    if (3, 11) <= facts.python < (3, 14):
        return Finding("Python", OK, here)
    return Finding("Python", PROBLEM, f"{here} is not supported", "Install Python 3.11, 3.12 or 3.13.")


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Each package of versions.toml against its range."""
    found = facts.machine.distributions
    comparable = find_spec("packaging") is not None
    for row in selection.supported_versions():
        name, wanted = row["name"], row["supported"]
        installed = [f"{n} {found[n]}" for n in row["distributions"] if n in found]
        if not installed:
            if name in ("vllm", "torch"):
                remedy = "Run: pip install 'vllm-npu-parity[cpu]' (or [cuda], [npu])"
                yield Finding(name, PROBLEM, "not installed", remedy)
            else:
                yield Finding(name, NOTE, f"not installed; only for {', '.join(row['devices'])}: {wanted}")
        elif comparable and (problem := selection.version_problem(row, found)):
            what, _, remedy = problem.partition(". ")
            yield Finding(name, PROBLEM, what, remedy)
        else:
            yield Finding(name, OK, f"{', '.join(installed)}; supported: {wanted}")


def check_registered(facts: Facts) -> Finding:
    """Entry point, and the variables that switch it off."""
    if not facts.registered:
        return Finding("plugin", PROBLEM, "vLLM does not see the plugin's entry point", "Run: pip install -e .")
    plugins = facts.machine.plugins
    if plugins is not None and "npu_parity" not in plugins.split(","):
        remedy = "Unset VLLM_PLUGINS, or add npu_parity to it."
        return Finding("plugin", PROBLEM, f"VLLM_PLUGINS={plugins} leaves npu_parity out", remedy)
    if facts.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        what = "VLLM_TARGET_DEVICE=cpu switches platform plugins off"
        return Finding("plugin", PROBLEM, what, "Run: unset VLLM_TARGET_DEVICE")
    return Finding("plugin", OK, "entry point npu_parity is registered")


def check_ascend(facts: Facts) -> Iterator[Finding]:
    """Driver, CANN and torch_npu fit together."""
    machine, name = facts.machine, "Ascend software"
    parts = (("driver", facts.driver), ("CANN", facts.cann), ("npu-smi", facts.npu_smi))
    present = ", ".join(f"{part} {value}" for part, value in parts if value)
    torch_npu = "torch_npu" in machine.distributions
    if machine.npus and not torch_npu:
        remedy = "To use the NPU: pip install 'vllm-npu-parity[npu]'"
        yield Finding(name, NOTE, f"{machine.npus} NPUs, but torch_npu is not installed; {present}", remedy)
    elif torch_npu and machine.missing_cann and machine.npus:
        what = f"torch_npu is installed, but CANN's {machine.missing_cann[0]} is not found; {present}"
        yield Finding(name, PROBLEM, what, f"Run: {SET_ENV}")
    elif present or torch_npu:
        yield Finding(name, OK, present or "torch_npu only")
    else:
        yield Finding(name, NOTE, "none; only NPUs need it")
    autoload = facts.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    if torch_npu and machine.missing_cann and autoload:
        missing = machine.missing_cann[0]
        what = f"torch loads torch_npu by itself, and CANN's {missing} is not found, so `import torch` fails"
        remedy = f"Run: export TORCH_DEVICE_BACKEND_AUTOLOAD=0, or, with CANN installed: {SET_ENV}"
        yield Finding("import of torch", PROBLEM, what, remedy)


def check_virtual_npu(facts: Facts) -> Finding:
    """torch_npu with no NPU: what it needs, and whether it is there."""
    name, what = "virtual NPU", "torch_npu on a stand-in CANN runtime, for machines with no NPU (--device virtual-npu)"
    try:
        selection.choose("virtual-npu", facts.machine)
    except selection.DeviceError as error:
        problem, _, remedy = str(error).partition(". ")
        return Finding(name, NOTE, f"{what}: {problem}", remedy)
    return Finding(name, OK, f"{what}; docs/virtual_npu.md says what it proves. Its runtime is compiled at the first use")


def check_triton(facts: Facts) -> Finding:
    """Two distributions own the folder ``triton``."""
    found = facts.machine.distributions
    both = [f"{name} {found[name]}" for name in ("triton", "triton-ascend") if name in found]
    if len(both) == 2:
        what = f"{' and '.join(both)} are both installed and overwrite each other's folder `triton`"
        remedy = "Run: pip uninstall triton triton-ascend, then: pip install 'triton-ascend==3.2.*' (on GPUs: triton)"
        return Finding("Triton", PROBLEM, what, remedy)
    return Finding("Triton", OK if both else NOTE, "".join(both) or "none; CUDA kernels need it")


def check_torchvision(facts: Facts) -> Finding:
    """A torchvision built for another torch breaks transformers."""
    if facts.torchvision:
        remedy = "Text models do not need it. Run: pip uninstall torchvision torchaudio torchcodec"
        what = f"does not import, and transformers fails with it: {facts.torchvision}"
        return Finding("torchvision", PROBLEM, what, remedy)
    return Finding("torchvision", OK, "not installed, not needed" if facts.torchvision is None else "imports")


def check_rivals(facts: Facts) -> Finding:
    """vllm-ascend, of which vLLM would accept only one beside us."""
    rival, plugins = facts.machine.distributions.get("vllm-ascend"), facts.machine.plugins
    if rival is None:
        return Finding("other plugins", OK, "none in the way")
    if plugins is not None and "ascend" not in plugins.split(","):
        return Finding("other plugins", OK, f"vllm-ascend {rival} is switched off by VLLM_PLUGINS={plugins}")
    what = f"vllm-ascend {rival} is installed as well, and vLLM accepts one platform plugin"
    remedy = "Run: pip uninstall vllm-ascend, or: export VLLM_PLUGINS=npu_parity"
    return Finding("other plugins", PROBLEM, what, remedy)


def check_shadow(facts: Facts) -> Finding:
    """A folder ``vllm/`` that Python would import in place of the package."""
    if facts.machine.shadow is None:
        return Finding("working directory", OK, "hides no package")
    what = f"the folder {facts.machine.shadow} hides the installed vllm package"
    return Finding("working directory", PROBLEM, what, "Run from another working directory.")


def check_choice(facts: Facts) -> Finding:
    """What ``--device auto`` means here."""
    machine = facts.machine
    try:
        device = selection.choose("auto", machine)
    except selection.DeviceError as error:
        what, _, remedy = str(error).partition(". ")
        return Finding("--device auto", PROBLEM, what, remedy or "See the other findings.")
    reasons = {"npu": f"{machine.npus} NPUs are visible", "cuda": f"no NPU, but {machine.gpus} GPUs are visible"}
    return Finding("--device auto", OK, f"{device}: {reasons.get(str(device), 'no NPU and no GPU is visible')}")


CHECKS: Sequence[Callable[[Facts], Finding | Iterator[Finding]]] = (
    check_python, check_versions, check_registered, check_ascend, check_virtual_npu, check_triton, check_torchvision,
    check_rivals, check_shadow, check_choice,
)  # fmt: skip


def environment(facts: Facts) -> list[Finding]:
    """All findings of the checks on the environment."""
    findings: list[Finding] = []
    for check in CHECKS:
        result = check(facts)
        findings.extend([result] if isinstance(result, Finding) else result)
    return findings


# Devices and operators: these import torch.


def devices(facts: Facts) -> tuple[list[str], list[Finding]]:
    """Device types that this process can use, and what they are; none if torch does not import."""
    # What automatic loading would break has its finding by now.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        from npu_ops import device, virtual_npu

        found = device.found_devices()
    except (ImportError, OSError) as error:
        remedy = "Run: pip install 'vllm-npu-parity[cpu]' (or [cuda], [npu])"
        return [], [Finding("torch", PROBLEM, f"does not import: {_line(error)}", remedy)]
    findings = []
    for name in found:
        free, total = device.memory_info(name)
        memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        stand_in = " on the stand-in runtime of the virtual NPU" if name == "npu" and virtual_npu.is_enabled() else ""
        why = f"ops by dispatch key {DISPATCH_KEYS[name]}: {WHY[name]}{stand_in}"
        findings.append(Finding(name, OK, f"{device.device_count(name)} × {device.device_name(name)}, {memory}; {why}"))
    machine = facts.machine
    for name, nodes, tool in (("npu", machine.npus, "npu-smi info"), ("cuda", machine.gpus, "nvidia-smi")):
        if nodes and name not in found:
            what = f"{nodes} in /dev, but torch cannot use them"
            findings.append(Finding(name, NOTE, what, f"Check {tool} and the findings above."))
    return found, findings


def operators(found: Sequence[str]) -> Iterator[Finding]:
    """For each device and op: the implementation that PyTorch takes there, and a call compared with the reference."""
    from npu_ops.contract import all_contracts

    for device in found:
        for name, contract in all_contracts().items():
            where, key = f"{name} on {device}", DISPATCH_KEYS[device]
            chosen = contract.provider_name(key).rpartition(".")[0]
            try:
                contract.provider(key)
                yield Finding(where, OK, f"{chosen}: {smoke(contract, device)}")
            except (ImportError, OSError) as error:
                remedy = f"Run: pip install 'vllm-npu-parity[{device}]'"
                yield Finding(where, PROBLEM, f"{chosen} does not import: {_line(error)}", remedy)
            except Exception as error:  # whatever a vendor's stack raises is the finding
                remedy = "Report it with the output of: python -m vllm_plugin doctor --json"
                yield Finding(where, PROBLEM, f"{chosen}: the smoke run fails: {_line(error)}", remedy)


def smoke(contract: OpContract, device: str) -> str:
    """Run the largest generated case, in fp16, and compare it with the reference in fp32. Small ones would hide a wrong mask.

    Raises:
        AssertionError: if the difference is larger than the op's tolerance.
    """
    import torch

    from npu_ops.contract import ContractError

    cases = sorted(contract.cases(device, torch.float16, 0), key=lambda case: -sum(x.numel() for x in _tensors(case)))
    for case in cases:
        # The contract has cases that one device refuses with a reason, such as small blocks on an NPU.
        with contextlib.suppress(ContractError):
            got = _outputs(contract, contract.op, case, lambda x: x.clone())
            break
    wanted = _outputs(contract, contract.reference, case, _lift)
    got, wanted = (contract.defined(case.args, results) for results in (got, wanted))
    worst = 0.0
    for mine, reference in zip(got, wanted, strict=True):
        bound, result = contract.bound(mine.dtype), mine.float().cpu()
        torch.testing.assert_close(result, reference.float(), atol=bound.atol, rtol=bound.rtol, equal_nan=True)
        # Where both are infinite or NaN the difference is NaN, and the assertion has found them equal.
        worst = max(worst, float((result - reference).abs().nan_to_num(0.0).max())) if result.numel() else worst
    return f"off the reference by {worst:.1e}"


def _tensors(case: OpCase) -> list[Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [x for x in tree_leaves(case.args) if isinstance(x, torch.Tensor)]


def _lift(x: Tensor) -> Tensor:
    return (x.float() if x.is_floating_point() else x).to("cpu", copy=True)


def _outputs(contract: OpContract, call: Callable[..., Any], case: OpCase, copy: Callable[[Any], Any]) -> list[Any]:
    """What a call on copies of the arguments returns, or the arguments that it writes."""
    import torch
    from torch.utils._pytree import tree_map_only

    args, kwargs = tree_map_only(torch.Tensor, copy, (case.args, case.kwargs))
    returned = call(*args, **kwargs)
    if contract.mutates:
        written = (argument.alias_info is not None for argument in contract.op._schema.arguments)
        returned = tuple(arg for arg, was_written in zip(args, written, strict=False) if was_written)
    return list(returned if isinstance(returned, tuple) else (returned,))


def _line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:300]


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Examine, print, and return 1 if there is a problem."""
    from rich.console import Console

    # With --json, standard output belongs to the object; vendors' libraries print there when they are loaded.
    with _stdout_to_stderr() if args.json else contextlib.nullcontext():
        console = Console(stderr=args.json)
        report = examine(console)
    problems = [finding for findings in report.values() for finding in findings if finding.status == PROBLEM]
    if args.json:
        sections = {section: [asdict(finding) for finding in findings] for section, findings in report.items()}
        print(json.dumps({"ok": not problems, "problems": len(problems), **sections}, indent=2))
    else:
        show(report, console)
    return 1 if problems else 0


def examine(console: Console) -> dict[str, list[Finding]]:
    """The whole report, by section."""
    with console.status("reading the environment") as status:
        facts = Facts.read()
        report = {"environment": environment(facts)}
        status.update("looking for devices")
        found, report["devices"] = devices(facts)
        report["operators"] = []
        if found:
            for finding in operators(found):
                report["operators"].append(finding)
                status.update(f"operators: {finding.name} done")
    return report


def show(report: Mapping[str, Sequence[Finding]], console: Console) -> None:
    """Tables, then every remedy, then the verdict."""
    from rich.markup import escape
    from rich.table import Table

    for section, findings in report.items():
        table = Table(title=section.capitalize(), title_justify="left", show_header=False, expand=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        for finding in findings:
            mark = f"[{COLOURS[finding.status]}]{finding.status}[/]"
            table.add_row(finding.name, mark, escape(finding.detail))
        console.print(table)
    remedies = [finding for findings in report.values() for finding in findings if finding.remedy]
    for finding in remedies:
        console.print(f"[{COLOURS[finding.status]}]{finding.status}[/] {finding.name}: {escape(finding.remedy)}")
    count = sum(finding.status == PROBLEM for finding in remedies)
    console.print(f"[bold red]Problems: {count}.[/]" if count else "[bold green]No problems.[/]")


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect the file descriptor, which C libraries use as well."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
