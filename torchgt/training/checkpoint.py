"""Checkpoints: atomic, verified on load, the two newest kept."""

from __future__ import annotations

import logging
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import torch

from torchgt.files import write_atomic

logger = logging.getLogger(__name__)

FORMAT = 1
KEEP = 2


class CheckpointStore:
    """The checkpoints `checkpoint-<epoch>.pt` of one run folder.

    A state is plain values and tensors only, so that it loads with `weights_only=True`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def paths(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("checkpoint-*.pt"))

    def save(self, epoch: int, state: dict[str, Any]) -> Path:
        """Write the state after `epoch` finished epochs, then drop all but the two newest."""
        path = self.folder / f"checkpoint-{epoch:06d}.pt"
        state = {"format": FORMAT, "epoch": epoch, "rng": rng_state(), **state}
        write_atomic(path, lambda handle: torch.save(state, handle))
        for old in self.paths()[:-KEEP]:
            old.unlink(missing_ok=True)
        return path

    def load(self, config_sha256: str, store_sha256: str) -> dict[str, Any] | None:
        """The newest state that is whole and belongs to this configuration and this store; None if there is none.

        A store that was prepared anew under the same path has another digest: its nodes, split or features may
        differ, so a state trained on the old one is not gone on from.

        A truncated newest checkpoint falls back to the one before it, with a warning.
        """
        for path in reversed(self.paths()):
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
            except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, KeyError) as error:
                logger.warning("%s: not a whole checkpoint (%s); trying the one before", path, _first_line(error))
                continue
            wanted = {"format": FORMAT, "config_sha256": config_sha256, "store_sha256": store_sha256}
            other = [name for name, value in wanted.items() if state.get(name) != value]
            if other:
                logger.warning("%s: not used, it has another %s", path, ", ".join(other))
                continue
            return state
        return None

    def clear(self) -> None:
        for path in self.paths():
            path.unlink(missing_ok=True)


def rng_state() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's generators as plain values and tensors."""
    import numpy as np

    kind, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    import numpy as np

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
