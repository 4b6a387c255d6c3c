"""Exchanges between "my tokens, all heads" and "all tokens, my heads".

Cluster-aware graph parallelism (TorchGT, SC'24; first as DeepSpeed-Ulysses, Jacobs et al. 2023): before attention each
worker trades its tokens' values of the other workers' heads for the other workers' tokens of its own heads, afterwards
back. Any number of tokens a worker and any number of heads works, fewer heads than workers and empty shares included.

Legend: R tokens (or pairs) on this worker, N on all of them, H heads, K heads of this worker, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from torchgt.parallel.traffic import Traffic


def near_even(total: int, parts: int) -> list[int]:
    """Sizes of `parts` contiguous shares of `total` things, the first ones larger by one if it does not divide."""
    return [total // parts + (part < total % parts) for part in range(parts)]


@dataclass(frozen=True)
class Exchange:
    """Who holds what: `rows[r]` tokens (or pairs) on worker r, `heads[r]` heads computed by worker r."""

    rows: tuple[int, ...]
    heads: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup
    traffic: Traffic
    category: str

    @property
    def my_heads(self) -> slice:
        """The heads that this worker computes."""
        begin = sum(self.heads[: self.rank])
        return slice(begin, begin + self.heads[self.rank])

    def start_to_heads(self, x_RHD: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """Starts trading [R, H, D] for [N, K, D]; the result may be read after `.wait()`."""
        width = x_RHD.shape[2]
        send = torch.cat([part.reshape(-1) for part in x_RHD.split(self.heads, dim=1)])
        out_NKD = x_RHD.new_empty((sum(self.rows), self.heads[self.rank], width))
        # Workers' shares arrive in rank order, each row-major in [R_r, K, D]: side by side they are [N, K, D] as it is.
        work = self._start(
            out_NKD.view(-1),
            send,
            [rows * self.heads[self.rank] * width for rows in self.rows],
            [self.rows[self.rank] * heads * width for heads in self.heads],
        )
        return out_NKD, work

    def to_tokens(self, y_NKD: torch.Tensor) -> torch.Tensor:
        """Trades [N, K, D] back for [R, H, D]."""
        width, rows = y_NKD.shape[2], self.rows[self.rank]
        received = y_NKD.new_empty(rows * sum(self.heads) * width)
        counts = [rows * heads * width for heads in self.heads]
        sent = [there * self.heads[self.rank] * width for there in self.rows]
        self._start(received, y_NKD.contiguous().view(-1), counts, sent).wait()
        parts = received.split(counts)
        return torch.cat([part.view(rows, heads, width) for part, heads in zip(parts, self.heads, strict=True)], dim=1)

    def _start(self, out: torch.Tensor, send: torch.Tensor, out_splits: list[int], send_splits: list[int]) -> dist.Work:
        self.traffic.add(self.category, (send.numel() - send_splits[self.rank]) * send.element_size())
        return dist.all_to_all_single(out, send, out_splits, send_splits, group=self.group, async_op=True)


def _all_to_heads(exchange: Exchange, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Starts every exchange before waiting for the first, so that one is packed while another travels."""
    started = [exchange.start_to_heads(x_RHD) for x_RHD in tensors]
    for _, work in started:
        work.wait()
    return tuple(out_NKD for out_NKD, _ in started)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: Exchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return _all_to_heads(exchange, tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Missing gradients arrive as zeros and travel like any other: every worker must make the same calls.
        return None, *(ctx.exchange.to_tokens(grad_NKD) for grad_NKD in grads)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: Exchange, y_NKD: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.to_tokens(y_NKD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_RHD: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, *_all_to_heads(ctx.exchange, (grad_RHD,))


def to_heads(exchange: Exchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each [R, H, D] becomes [N, K, D]: every worker's tokens, this worker's heads. Collective, differentiable once."""
    return _ToHeads.apply(exchange, *tensors)


def to_tokens(exchange: Exchange, y_NKD: torch.Tensor) -> torch.Tensor:
    """[N, K, D] becomes [R, H, D]: this worker's tokens, every head. Collective, differentiable once."""
    return _ToTokens.apply(exchange, y_NKD)


def starts(sizes: list[int] | tuple[int, ...]) -> list[int]:
    """Where each share begins, and the total at the end."""
    return [0, *accumulate(sizes)]
