"""Sums gradients of replicated parameters over the workers, many parameters a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from torchgt.parallel.traffic import Traffic

_BUCKET_BYTES = 25 << 20  # large enough to fill a link, small enough not to double a large model's memory


def all_reduce_gradients(
    parameters: Iterable[torch.nn.Parameter],
    group: dist.ProcessGroup,
    traffic: Traffic,
    bucket_bytes: int = _BUCKET_BYTES,
) -> None:
    """Replaces each parameter's gradient by its sum over the workers of `group`. Collective.

    Every worker passes the same parameters in the same order. A gradient missing on some workers counts as zero there;
    one missing on all stays None, so that an optimiser skips the same parameters as on one process. Counts, for each
    call, the 2 (P - 1) / P of its bytes that a ring all-reduce makes each of P workers send.
    """
    world_size = dist.get_world_size(group)
    for bucket in _buckets([p for p in parameters if p.requires_grad], bucket_bytes):
        flat, present = _sum_over_workers(bucket, group)
        traffic.add("parameters", 2 * (world_size - 1) * flat.numel() * flat.element_size() // world_size)
        *parts, _ = flat.split([*(p.numel() for p in bucket), len(bucket)])
        for parameter, part, has_grad in zip(bucket, parts, present, strict=True):
            if not has_grad:
                continue
            if parameter.grad is None:
                parameter.grad = part.view_as(parameter).clone()
            else:
                parameter.grad.copy_(part.view_as(parameter))


def _buckets(parameters: list[torch.nn.Parameter], limit: int) -> Iterator[list[torch.nn.Parameter]]:
    """Runs of parameters of one dtype and device, each of about `limit` bytes."""
    by_kind: dict[tuple, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for same_kind in by_kind.values():
        bucket, size = [], 0
        for parameter in same_kind:
            num_bytes = parameter.numel() * parameter.element_size()
            if bucket and size + num_bytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += num_bytes
        yield bucket


def _sum_over_workers(bucket: list[torch.nn.Parameter], group: dist.ProcessGroup) -> tuple[torch.Tensor, list[bool]]:
    """The bucket's summed gradients, flat, and for each parameter whether any worker had one.

    The flags ride at the end of the same buffer: counts of at most P are exact in every float type in use.
    """
    pieces = [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in bucket]
    flags = torch.tensor([float(p.grad is not None) for p in bucket], dtype=pieces[0].dtype, device=pieces[0].device)
    flat = torch.cat([*pieces, flags])
    dist.all_reduce(flat, group=group)
    return flat, [count > 0 for count in flat[-len(bucket) :].tolist()]
