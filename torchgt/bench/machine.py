"""What a time was measured on, and with which code."""

from __future__ import annotations

import datetime
import functools
import hashlib
import inspect
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parent.parent


def machine_class(device: torch.device) -> dict[str, Any]:
    """What must be equal for two times to be compared: CPU model, threads, GPU model and count, driver, torch."""
    on_gpu = device.type == "cuda"
    return {
        "cpu_model": cpu_model(),
        "threads": torch.get_num_threads(),
        "gpu_model": torch.cuda.get_device_name(device) if on_gpu else None,
        "gpu_count": torch.cuda.device_count() if on_gpu else 0,
        "driver": _driver() if on_gpu else None,
        "torch": torch.__version__,
    }


@functools.cache
def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def code_provenance(system_class: type) -> dict[str, Any]:
    """Where a record comes from: host (hashed), commit, dirty, python, packages (hashed), date, code digest."""
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:16],
        "commit": commit,
        "dirty": None if status is None else bool(status),
        "python": platform.python_version(),
        "packages": _packages_digest(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "code_sha256": code_digest(system_class),
    }


def code_digest(system_class: type) -> str:
    """sha256 over the torchgt sources and the module that defines the system."""
    files = sorted(p for p in PACKAGE.rglob("*") if p.suffix in {".py", ".cpp", ".h"})
    own = inspect.getsourcefile(system_class)
    if own and Path(own).resolve() not in files:
        files.append(Path(own).resolve())
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _packages_digest() -> str:
    names = sorted(f"{d.metadata['Name']}=={d.version}" for d in metadata.distributions())
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _driver() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.splitlines() or [None])[0]


__all__ = ["code_digest", "code_provenance", "cpu_model", "machine_class"]
