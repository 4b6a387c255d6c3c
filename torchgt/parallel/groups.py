"""Starting and ending a group of worker processes, and small collectives over it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def init_distributed(device: str | None = None, timeout_s: float = 1800.0) -> dist.ProcessGroup | None:
    """The group of all workers that torchrun started, or None in a process of its own.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun sets them. device: "cpu" (gloo) or
    "cuda" (NCCL for tensors on a GPU, gloo for host memory, worker LOCAL_RANK on GPU LOCAL_RANK); None takes the GPU if
    there is one. timeout_s: how long a collective waits for the others. A second call returns the same group. Raises
    ValueError if there are fewer GPUs than workers on this machine or for another device.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'cpu' or 'cuda', found {device!r}")
    backend = "gloo"
    if device == "cuda":
        local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= count:
            raise ValueError(f"device: worker {local_rank} of this machine needs a GPU of its own, found {count}")
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return dist.group.WORLD


def shutdown_distributed() -> None:
    """Ends the group that `init_distributed` started, after a run that succeeded; does nothing without one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def control_device(group: dist.ProcessGroup) -> torch.device:
    """Where small numbers travel: through host memory if the group can, which spares a GPU synchronisation."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def all_gather_integers(numbers: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """The same few integers from every worker, in rank order. Collective."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=control_device(group))
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]


def broadcast_object(compute: Callable[[], T], group: dist.ProcessGroup) -> T:
    """What `compute()` returns on worker 0, on every worker. Collective. If it raises there, every worker raises it."""
    result, error = None, None
    if dist.get_rank(group) == 0:
        try:
            result = compute()
        except Exception as caught:  # carried to the other workers, which would otherwise wait for ever
            error = caught
    box = [result, error]
    dist.broadcast_object_list(box, group=group, group_src=0, device=control_device(group))
    if box[1] is not None:
        raise box[1]
    return box[0]
