"""Peak memory of a process: resident on the CPU, allocated on a GPU. Bytes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")


def proc_status_bytes(key: str) -> int | None:
    """A size of /proc/self/status (VmHWM, VmRSS, VmData) in bytes; None where there is no such file or line."""
    if not STATUS.exists():
        return None
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def peak_resident_bytes() -> int:
    """Largest resident size of this process so far (VmHWM)."""
    peak = proc_status_bytes("VmHWM")
    if peak is None:  # macOS counts bytes, Linux kilobytes
        maxrss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = maxrss if sys.platform == "darwin" else maxrss * 1024
    return peak


class PeakMemory:
    """Peak memory since it was made; make it after the imports, before any data is loaded."""

    def __init__(self) -> None:
        self.baseline = proc_status_bytes("VmRSS") or peak_resident_bytes()

    def report(self, device: Any) -> dict[str, Any]:
        """{"baseline_bytes", "peak_bytes"}: CPU: VmHWM minus the resident size after import; GPU: max allocated."""
        if device.type == "cuda":
            import torch

            return {"baseline_bytes": 0, "peak_bytes": torch.cuda.max_memory_allocated(device)}
        return {"baseline_bytes": self.baseline, "peak_bytes": max(0, peak_resident_bytes() - self.baseline)}


def limit_memory(extra_bytes: int) -> None:
    """Let this process take `extra_bytes` of private memory (RLIMIT_DATA) beyond what it has now.

    Not the address space: memory maps of files and a GPU's reservations would count there.
    """
    now = proc_status_bytes("VmData")
    if now is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = now + int(extra_bytes)
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
