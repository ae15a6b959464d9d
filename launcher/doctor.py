"""Checks of the machine that a run would start on."""

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

PACKAGES = ("torch", "torchvision", "deepspeed", "fairscale", "transformers", "timm", "pydantic", "datasets")
SMALL_SHM_BYTES = 2**30


@dataclass(frozen=True)
class Finding:
    """One checked thing: ``ok``; ``note``: works, with less; ``missing``: training cannot start."""

    what: str
    state: Literal["ok", "note", "missing"]
    found: str
    mend: str = ""


def examine() -> list[Finding]:
    """Look at everything."""
    return [*_packages(), *_devices(), *_compilers(), *_system()]


def print_report(findings: list[Finding], as_json: bool) -> int:
    """Print the findings; gives 2 if something is missing, else 0."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table("", "what", "found", "how to mend it")
        for finding in findings:
            sign = {"ok": "✓", "note": "·", "missing": "✗"}[finding.state]
            table.add_row(sign, finding.what, finding.found, finding.mend)
        console = Console()
        Console(width=console.width if console.is_terminal else 120).print(table)
    return 2 if any(finding.state == "missing" for finding in findings) else 0


def _packages() -> list[Finding]:
    findings = [Finding("python", "ok", sys.version.split()[0])]
    required = {}
    for line in metadata.requires("vlfit") or []:
        name = line.split(";")[0].strip()
        bare = next((name[:place] for place, letter in enumerate(name) if letter in "<>=!~ ["), name)
        required[bare] = name
    for package in PACKAGES:
        try:
            findings.append(Finding(package, "ok", metadata.version(package), ""))
        except metadata.PackageNotFoundError:
            findings.append(
                Finding(
                    package, "missing", "not installed", f"pip install '{required.get(package, package)}'"
                )
            )
    return findings


def _devices() -> list[Finding]:
    import torch

    from launcher.config.device import DeviceSupport

    findings = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            findings.append(
                Finding(
                    f"cuda:{index}", "ok", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
                )
            )
    else:
        findings.append(
            Finding(
                "GPU", "note", "none that torch can use: runs on the CPU", "check nvidia-smi and the driver"
            )
        )
    support = DeviceSupport.detect()
    findings.append(Finding("bf16", "ok" if support.bf16 else "note", "yes" if support.bf16 else "no"))
    mend = "" if support.fp16 else "configs with fp16 run in bf16 here, and say so"
    findings.append(Finding("fp16", "ok" if support.fp16 else "note", "yes" if support.fp16 else "no", mend))
    return findings


def _compilers() -> list[Finding]:
    findings = []
    for tool, mend in (
        ("ninja", "pip install ninja; put its folder on PATH"),
        ("g++", "install g++ (build-essential)"),
    ):
        path = shutil.which(tool)
        state: Literal["ok", "missing"] = "ok" if path else "missing"
        findings.append(Finding(tool, state, "yes" if path else "not on PATH", "" if path else mend))
    nvcc = shutil.which("nvcc")
    findings.append(
        Finding(
            "nvcc",
            "ok" if nvcc else "note",
            "yes" if nvcc else "not on PATH",
            "" if nvcc else "only for fused CUDA optimizers",
        )
    )
    return findings


def _system() -> list[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    findings = [
        Finding("cores", "ok", str(os.cpu_count())),
        Finding(
            "host memory", "ok", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
        ),
    ]
    if os.path.isdir("/dev/shm"):
        usage = shutil.disk_usage("/dev/shm")
        small = usage.free < SMALL_SHM_BYTES
        mend = "data workers may die of a bus error: docker --shm-size=8g, or --workers 0" if small else ""
        findings.append(
            Finding("/dev/shm", "note" if small else "ok", f"{usage.free / 2**30:.1f} GiB free", mend)
        )
    disk = shutil.disk_usage(os.getcwd())
    findings.append(Finding("disk here", "ok", f"{disk.free / 2**30:.0f} GiB free"))
    for tool, what in (("sbatch", "SLURM"), ("pdsh", "deepspeed over several nodes")):
        found = shutil.which(tool)
        findings.append(
            Finding(
                tool,
                "ok" if found else "note",
                "yes" if found else "not on PATH",
                "" if found else f"only for {what}",
            )
        )
    return findings
