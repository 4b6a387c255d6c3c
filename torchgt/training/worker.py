"""The supervised process: `python -m torchgt.training.worker`. Started by the supervisor, not by users."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import traceback
from pathlib import Path

from torchgt.errors import BusyError, ConfigError, RefusedError
from torchgt.files import write_json_atomic
from torchgt.training.config import RunConfig
from torchgt.training.supervisor import EXIT_BUSY, EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_OK, EXIT_REPORTED

PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--config", "--out", "--run-dir", "--failure"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--plugin", action="append", default=[])
    parser.add_argument("--no-resume", action="store_true")
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    sys.path.insert(0, os.getcwd())

    from torchgt.bench.memory import limit_memory
    from torchgt.data.store import StoreError
    from torchgt.parallel import shutdown_distributed
    from torchgt.training.trainer import Interrupted, train

    try:
        config = RunConfig.from_yaml(arguments.config)
        config.plugins = arguments.plugin
        if config.budget.memory_bytes:
            limit_memory(config.budget.memory_bytes)
        record = train(config, arguments.run_dir, resume=not arguments.no_resume)
        if int(os.environ.get("RANK", 0)) == 0:
            record.write(arguments.out)
        shutdown_distributed()
        return EXIT_OK
    except (ConfigError, StoreError) as error:
        print(f"torchgt: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except Interrupted as error:
        print(f"torchgt: {error}; the same command resumes from {arguments.run_dir}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BusyError as error:
        print(f"torchgt: {error}", file=sys.stderr)
        return EXIT_BUSY
    except RefusedError as error:
        return _report(arguments.failure, "refused", str(error))
    except Exception as error:
        if is_out_of_memory(error):
            return _report(arguments.failure, "oom", str(error).splitlines()[0] if str(error) else "out of memory")
        traceback.print_exc()
        return _report(arguments.failure, "error", f"{type(error).__name__}: {error}".splitlines()[0])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the CPU or on a GPU."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, (RuntimeError, OSError)) and any(
        sign in text for sign in ("can't allocate memory", "not enough memory", "Cannot allocate memory", "bad_alloc")
    )


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux); a supervisor killed outright leaves nothing."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(EXIT_INTERRUPTED)


def _report(failure: Path, status: str, error: str) -> int:
    write_json_atomic(failure, {"status": status, "error": error})
    return EXIT_REPORTED


if __name__ == "__main__":
    sys.exit(main())
