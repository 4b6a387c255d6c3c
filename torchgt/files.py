"""Files that are either whole or not there."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO


def write_atomic(path: str | Path, write: Callable[[BinaryIO], Any]) -> None:
    """Call `write` on a temporary file beside `path`, flush it to disk, and rename it into place.

    A reader sees the old file or the new one, whatever happens in between. Missing parents are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as handle:
            write(handle)
            handle.flush()
            os.fsync(handle.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp gives 0600, which would surprise a shared results folder
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json_atomic(path: str | Path, value: Any) -> None:
    """Write strict JSON (NaN and infinity refused) atomically."""
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    write_atomic(path, lambda handle: handle.write(text.encode()))
