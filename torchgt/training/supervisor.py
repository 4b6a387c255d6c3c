"""The supervising process: starts the trainer, enforces its budget, and writes the record if the trainer could not.

It imports neither torch nor numpy, so that it costs milliseconds and cannot run out of memory itself. The trainer is
a fresh process in a session of its own: whatever it started is gone when this function returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchgt.training.config import RunConfig
from torchgt.training.record import RunRecord

EXIT_OK, EXIT_ERROR, EXIT_CONFIG, EXIT_REPORTED, EXIT_BUSY, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130
OUT_OF_MEMORY_SIGNS = ("bad_alloc", "can't allocate memory", "Cannot allocate memory", "Thread creation failed")
GRACE_S = 20.0  # for a trainer that was told to stop: it may be writing a checkpoint
TAIL_LINES = 40


def supervise(config_file: Path, config: RunConfig, out: Path, run_dir: Path, *, resume: bool = True) -> int:
    """Run the trainer on `config_file` and see to it that `out` holds a record.

    Returns:
        0 if a record with status ok, oom, timeout or refused was written; 1 with status error; 2 if the
        configuration or the store is invalid (nothing is written); 130 if a signal stopped the run (no record, the
        checkpoint in `run_dir` resumes).
    """
    with tempfile.TemporaryDirectory(prefix="torchgt-") as scratch:
        failure_file = Path(scratch) / "failure.json"
        command = [sys.executable, "-m", "torchgt.training.worker", "--config", str(config_file), "--out", str(out)]
        command += ["--run-dir", str(run_dir), "--failure", str(failure_file), "--parent", str(os.getpid())]
        command += [f"--plugin={module}" for module in config.plugins] + ([] if resume else ["--no-resume"])
        code, timed_out, interrupted, tail = _run(command, config.budget.seconds)
        failure = json.loads(failure_file.read_text()) if failure_file.exists() else None
    if interrupted or (code == EXIT_INTERRUPTED and not timed_out):
        return EXIT_INTERRUPTED
    if code in (EXIT_OK, EXIT_CONFIG):  # also a run that ended just as its time did
        return code
    if code == EXIT_BUSY:  # the record is the other process's to write
        return EXIT_ERROR
    status, error = _diagnose(code, timed_out, failure, tail, config)
    if int(os.environ.get("RANK", 0)) == 0:
        _failed_record(config, status, error, run_dir).write(out)
    print(f"torchgt: {config.system} on {config.store}: {status}: {error}", file=sys.stderr)
    return EXIT_ERROR if status == "error" else EXIT_OK


def _run(command: list[str], seconds: float | None) -> tuple[int, bool, bool, list[str]]:
    """Exit code, whether the time budget ended it, whether a signal to us did, and the last lines of stderr."""
    environment = dict(os.environ)
    if sys.stderr.isatty():
        environment["TORCHGT_PROGRESS"] = "1"
    # A worker that is started with `python -m` finds the checkout's modules (plug-ins) in the current folder.
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True, env=environment
    )
    tail: list[str] = []
    pump = threading.Thread(target=_pump, args=(process.stderr, tail), daemon=True)
    pump.start()
    timed_out = False
    with _forwarding(process) as received:
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            _stop(process)
        except InterruptedError:
            _stop(process)
    _kill_group(process)  # whatever the trainer started itself
    pump.join(timeout=5)
    return process.returncode, timed_out, bool(received), tail


def _pump(stream: Any, tail: list[str]) -> None:
    """Copy the worker's stderr to ours as it comes, progress bars included, and keep its last lines."""
    line = ""
    while character := stream.read(1):
        sys.stderr.write(character)
        if character in "\n\r":
            sys.stderr.flush()
            tail.append(line)
            del tail[:-TAIL_LINES]
            line = ""
        else:
            line += character
    if line:
        tail.append(line)
    sys.stderr.flush()


@contextlib.contextmanager
def _forwarding(process: subprocess.Popen) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on to the worker; yields the list of those received."""
    received: list[int] = []

    def handler(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) == 1:
            raise InterruptedError

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _stop(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        process.wait()


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _diagnose(
    code: int, timed_out: bool, failure: dict[str, str] | None, tail: list[str], config: RunConfig
) -> tuple[str, str]:
    """The record's status and error for a worker that did not write one."""
    if timed_out:
        return "timeout", f"stopped at the budget of {config.budget.seconds:g} s"
    if failure is not None:
        return failure["status"], failure["error"]
    if any(sign in line for line in tail for sign in OUT_OF_MEMORY_SIGNS):
        return "oom", "the memory budget was reached: " + next(
            line.strip() for line in tail for sign in OUT_OF_MEMORY_SIGNS if sign in line
        )
    if code == -signal.SIGKILL:
        return "oom", "killed by SIGKILL, as the system does when memory runs out"
    if code < 0:
        return "error", f"killed by {signal.Signals(-code).name}"
    last = next((line.strip() for line in reversed(tail) if line.strip()), "no message")
    return "error", f"exit code {code}: {last}"


def _failed_record(config: RunConfig, status: str, error: str, run_dir: Path) -> RunRecord:
    """The trainer's own partial record, if it got so far, else one from the configuration alone."""
    try:
        record = RunRecord.read(run_dir / "partial.json")
        if record.config_sha256 == config.sha256():
            record.status, record.error = status, error
            return record
    except ValueError:
        pass
    return RunRecord(
        status=status,
        error=error,
        system=config.system,
        model=config.model,
        dataset=_store_name(config.store),
        split=config.split,
        seed=config.seed,
        protocol=config.protocol,
        config=config.to_dict(),
        config_sha256=config.sha256(),
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
        precision=config.precision,
        budget={"seconds": config.budget.seconds, "memory_bytes": config.budget.memory_bytes},
    )


def _store_name(store: str) -> str:
    try:
        return str(json.loads((Path(store) / "meta.json").read_text())["name"])
    except (OSError, ValueError, KeyError):
        return Path(store).name
