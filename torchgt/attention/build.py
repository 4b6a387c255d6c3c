"""The compiled CPU kernels: found in a cache folder, or compiled into it once.

The library's name carries a digest of the sources, flags, torch version and CPU level, so a changed source is a
different file and nothing is ever stale. It is compiled in a temporary folder under a file lock and renamed into
place: a library that exists is whole. The lock is the operating system's and ends with its owner, so a killed build
blocks nobody. An already built library loads in milliseconds, without importing torch's extension builder.

Environment: TORCHGT_CACHE (folder, default ~/.cache/torchgt), TORCHGT_PORTABLE=1 (compile for any CPU of the
architecture), TORCHGT_NO_CPP=1 (do without the kernels), CXX (compiler, default g++).
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_SOURCES = Path(__file__).parent / "csrc"
_UNITS = ("kernels_f32.cpp", "kernels_bf16.cpp", "kernels_f64.cpp", "ops.cpp")
# No -ffast-math: NaN and infinity keep their meaning and sums their order. Contraction to fused multiply-add and
# dropping errno and floating-point traps change neither.
_FLAGS = (
    "-std=c++20 -O3 -fPIC -fopenmp -fvisibility=hidden -fno-math-errno -fno-trapping-math -ffp-contract=fast -Wno-psabi"
).split()
_MIN_GCC = 12  # __builtin_shufflevector
_log = logging.getLogger("torchgt")
_state: bool | str | None = None


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the message is one line."""


def load() -> bool | str:
    """True once the kernels are loaded (compiling them first if need be), otherwise one line that says why not."""
    global _state
    if _state is None:
        try:
            _load()
            _state = True
        except BuildError as error:
            _state = str(error)
    return _state


def _load() -> None:
    if os.environ.get("TORCHGT_NO_CPP") == "1":
        raise BuildError("the C++ kernels are switched off by TORCHGT_NO_CPP=1")
    if not sys.platform.startswith("linux"):
        raise BuildError(f"the C++ kernels are built on Linux only, not on {sys.platform}")
    path = library_path()
    if not path.exists():
        _build_locked(path)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise BuildError(f"the compiled kernels do not load: {_one_line(str(error))}") from error


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("TORCHGT_CACHE") or Path.home() / ".cache" / "torchgt").expanduser()


def library_path() -> Path:
    """The library of these sources for this torch and this CPU, built or not."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    flags = " ".join(_flags())
    digest.update(f"{flags}|{torch.__version__}|{platform.machine()}|{sys.platform}".encode())
    return cache_folder() / f"kernels-{digest.hexdigest()[:20]}.so"


def _flags() -> list[str]:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [*_FLAGS, abi, *_cpu_flags()]


def _cpu_flags() -> list[str]:
    if os.environ.get("TORCHGT_PORTABLE") == "1":
        return []
    # torch's own test for AVX2 with FMA. Levels above gain nothing from eight lanes of float.
    return ["-mavx2", "-mfma"] if torch.backends.cpu.get_cpu_capability().startswith("AVX") else []


def _build_locked(path: Path) -> None:
    from filelock import FileLock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():  # else another process has built it meanwhile
                _build(path)
    except OSError as error:
        raise BuildError(f"cannot write the folder of compiled kernels {path.parent}: {error.strerror}") from error


def _build(path: Path) -> None:
    compiler = _compiler()
    _log.warning("compiling the attention kernels into %s, once; this takes about a minute", path.parent)
    start = time.monotonic()
    root = Path(torch.__file__).parent
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        objects = [str(Path(folder) / f"{unit}.o") for unit in _UNITS]
        commands = [
            [compiler, *_flags(), *includes, "-c", str(_SOURCES / unit), "-o", target]
            for unit, target in zip(_UNITS, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            list(pool.map(_run, commands))
        # OpenMP is left unlinked: its symbols must come from the runtime that torch has loaded, so that the kernels
        # run on torch's threads. "now" turns a missing symbol into an error while loading.
        library = Path(folder) / path.name
        links = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", "-Wl,-z,now"]
        _run([compiler, "-shared", *objects, *links, "-o", str(library)])
        os.replace(library, path)
    _log.warning("compiled the attention kernels in %.0f s", time.monotonic() - start)


def _compiler() -> str:
    name = os.environ.get("CXX") or "g++"
    compiler = shutil.which(name)
    if compiler is None:
        raise BuildError(f"no C++ compiler: {name!r} is not on the PATH (GCC {_MIN_GCC} or newer is needed; see CXX)")
    version = _run([compiler, "--version"]).splitlines()[0]
    major = re.match(r"\d+", _run([compiler, "-dumpversion"]))
    if "clang" in version.lower() or major is None or int(major[0]) < _MIN_GCC:
        raise BuildError(f"the C++ compiler {compiler} is {version!r}; GCC {_MIN_GCC} or newer is needed (see CXX)")
    return compiler


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        lines = done.stderr.splitlines()
        cause = next((line for line in lines if "error" in line), lines[-1] if lines else f"exit {done.returncode}")
        raise BuildError(f"the C++ compiler {command[0]} failed: {_one_line(cause)}")
    return done.stdout


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
