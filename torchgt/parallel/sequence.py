"""SequenceParallel: attention over a sequence whose tokens are split over workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from torchgt.attention import graph_attention
from torchgt.errors import unknown
from torchgt.parallel import gradients, groups
from torchgt.parallel.all_to_all import Exchange, near_even, starts, to_heads, to_tokens
from torchgt.parallel.traffic import Traffic

if TYPE_CHECKING:
    from torchgt.pattern import AttentionPattern
    from torchgt.reformation import Reformation

T = TypeVar("T")

STRATEGIES = ("all_to_all",)
_LATER = ("halo", "ring")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SequenceParallel:
    """Splits attention over the workers of `group`; `group=None` is one process, where everything is local.

    Worker r holds a contiguous share of the node tokens, in rank order, of any size. Global tokens stand at the
    beginning of worker 0's share. Strategy "all_to_all": each worker computes its share of the heads over all tokens
    (see `torchgt.parallel.all_to_all`). Raises ValueError for an unknown strategy.
    """

    def __init__(self, group: dist.ProcessGroup | None, strategy: str = "all_to_all") -> None:
        if strategy in _LATER:
            raise NotImplementedError(
                f"strategy: {strategy!r} is not available in this version; available: {', '.join(STRATEGIES)}"
            )
        if strategy not in STRATEGIES:
            raise ValueError(unknown("parallel strategy", strategy, STRATEGIES))
        self.group = group
        self.strategy = strategy
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self._traffic = Traffic()

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and calls by category since the last reset."""
        return self._traffic

    def traffic_totals(self) -> dict[str, tuple[int, int]]:
        """(bytes sent, calls) of each category since the last reset."""
        return {key: (self._traffic.bytes_sent[key], self._traffic.calls[key]) for key in self._traffic.calls}

    def reset_traffic(self) -> None:
        """Sets every count of `traffic` to 0."""
        self._traffic.reset()

    def shard_sizes(self, num_node_tokens: int) -> list[int]:
        """How many node tokens each worker gets: contiguous shares, as even as can be."""
        return near_even(num_node_tokens, self.world_size)

    def local_slice(self, num_node_tokens: int) -> slice:
        """This worker's share of the node tokens."""
        begin = starts(self.shard_sizes(num_node_tokens))
        return slice(begin[self.rank], begin[self.rank + 1])

    def all_reduce_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sums the gradients over the workers; see `torchgt.parallel.gradients`. Collective."""
        if self.world_size > 1:
            gradients.all_reduce_gradients(parameters, self.group, self._traffic)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the workers' tensors of one shape, as a new tensor without gradient. Collective; not counted."""
        total = tensor.detach().clone()
        if self.world_size > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def broadcast_object(self, compute: Callable[[], T]) -> T:
        """What `compute()`, called on worker 0 only, returns; or raises what it raises. On every worker; collective."""
        return compute() if self.world_size == 1 else groups.broadcast_object(compute, self.group)

    def gather_sizes(
        self,
        num_tokens: int,
        first_token: int,
        pattern: AttentionPattern | Reformation,
        pair_bias: torch.Tensor | None = None,
    ) -> list[int]:
        """How many tokens each worker holds, global ones included, to pass to several `attention` calls. Collective.

        first_token: position in the sequence of this worker's first token, global ones counted. Raises ValueError, on
        every worker alike, if the shares are not contiguous in rank order or do not add up to the pattern.
        """
        pair_rows = -1 if pair_bias is None else pair_bias.shape[0]
        rows = groups.all_gather_integers([num_tokens, first_token, pair_rows], self.group)
        sizes, first, pair_rows = (list(column) for column in zip(*rows, strict=True))
        if first != starts(sizes)[:-1]:
            raise ValueError(f"token_offset: the workers' shares of {sizes} tokens begin at {first}")
        _check_shares(pattern, sizes, pair_rows)
        return sizes

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pattern: AttentionPattern | Reformation,
        *,
        pair_bias: torch.Tensor | None = None,
        type_bias: torch.Tensor | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
        dropout_seed: torch.Tensor | None = None,
        impl: str = "auto",
        sizes: list[int] | None = None,
    ) -> torch.Tensor:
        """`graph_attention` over the whole sequence, this worker's share in, this worker's share out. Collective.

        query, key, value: [N_r, H, D], worker 0's beginning with the global tokens. pattern: the whole sequence's.
        pair_bias: [E_r, H] along the pairs of this worker's rows. type_bias [num_types, H], dropout and impl as in
        `graph_attention`, equal on all workers; the gradient of type_bias is this worker's part of a sum over workers.
        sizes: tokens of each worker as `gather_sizes` gives them; without it the workers exchange and check the shapes
        of their arguments here. Returns [N_r, H, D], equal to one process up to rounding, gradients too.

        Raises ValueError, on every worker alike, for shares that do not add up to the pattern or differ in heads,
        width, dtype or arguments.
        """
        keywords = {"scale": scale, "dropout_p": dropout_p, "dropout_seed": dropout_seed, "impl": impl}
        if self.world_size == 1:
            return graph_attention(query, key, value, pattern, pair_bias=pair_bias, type_bias=type_bias, **keywords)
        if sizes is None:
            sizes = self._agree(query, key, value, pattern, pair_bias, type_bias)
        heads = near_even(query.shape[1], self.world_size)
        exchange = Exchange(tuple(sizes), tuple(heads), self.rank, self.group, self._traffic, "attention")
        q_NKD, k_NKD, v_NKD = to_heads(exchange, query, key, value)
        mine = exchange.my_heads
        if type_bias is not None:
            type_bias = type_bias[:, mine]
        if pair_bias is not None:
            along_pairs = replace(exchange, rows=_pairs_per_worker(pattern, sizes), category="bias")
            (pair_bias_EK1,) = to_heads(along_pairs, pair_bias.unsqueeze(2))
            pair_bias = pair_bias_EK1.squeeze(2)
        # Without a head of its own a worker still calls, for an empty output that is connected to all inputs: its
        # backward pass must make the same exchanges as the others'.
        out_NKD = graph_attention(
            q_NKD,
            k_NKD,
            v_NKD,
            pattern,
            pair_bias=pair_bias,
            type_bias=type_bias,
            head_offset=mine.start,
            **keywords,
        )
        return to_tokens(exchange, out_NKD)

    def _agree(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pattern: AttentionPattern | Reformation,
        pair_bias: torch.Tensor | None,
        type_bias: torch.Tensor | None,
    ) -> list[int]:
        """Tokens of each worker, after all workers have checked that their arguments fit together."""
        heads = query.shape[1] if query.dim() == 3 else -1
        fits = (
            heads > 0
            and query.dtype in _DTYPES
            and query.shape == key.shape == value.shape
            and query.dtype == key.dtype == value.dtype
            and (type_bias is None or type_bias.shape == (_stored(pattern).num_types, heads))
            and (pair_bias is None or (pair_bias.dim() == 2 and pair_bias.shape[1] == heads))
        )
        has_bias = (pair_bias is not None) + 2 * (type_bias is not None)
        kind = [
            int(fits),
            heads,
            query.shape[-1] if heads > 0 else -1,
            _DTYPES.index(query.dtype) if fits else -1,
            has_bias,
        ]
        pair_rows = -1 if pair_bias is None else pair_bias.shape[0]
        rows = groups.all_gather_integers([query.shape[0], pair_rows, pattern.num_tokens, *kind], self.group)
        if any(row[2:] != rows[0][2:] or not row[3] for row in rows):
            raise ValueError(
                "query, key, value: every worker must pass three tensors [N_r, H, D] of one shape and floating dtype "
                "with the same pattern and biases of H heads; this worker's are "
                f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)} of {query.dtype}, pair_bias "
                f"{None if pair_bias is None else tuple(pair_bias.shape)}, type_bias "
                f"{None if type_bias is None else tuple(type_bias.shape)}, pattern of {pattern.num_tokens} tokens"
            )
        sizes = [row[0] for row in rows]
        _check_shares(pattern, sizes, [row[1] for row in rows])
        return sizes


def _check_shares(pattern: AttentionPattern | Reformation, sizes: list[int], pair_rows: list[int]) -> None:
    """Raises ValueError if the workers' rows do not make up the pattern's; a -1 in pair_rows means no pair_bias."""
    if sum(sizes) != pattern.num_tokens:
        raise ValueError(f"pattern: has {pattern.num_tokens} tokens, but the workers hold {sizes}")
    if pair_rows != [-1] * len(sizes) and tuple(pair_rows) != _pairs_per_worker(pattern, sizes):
        raise ValueError(
            f"pair_bias: expected {list(_pairs_per_worker(pattern, sizes))} rows on the workers, found {pair_rows}"
        )


def _stored(pattern: AttentionPattern | Reformation) -> AttentionPattern:
    return pattern.to_pattern() if hasattr(pattern, "to_pattern") else pattern


def _pairs_per_worker(pattern: AttentionPattern | Reformation, sizes: list[int]) -> tuple[int, ...]:
    """Stored pairs in the rows of each worker's tokens."""
    pattern = _stored(pattern)
    begin = torch.tensor(starts(sizes))
    if getattr(pattern, "is_full", False):  # counted, since its pairs must not be laid out
        graph_sizes = pattern.ptr.diff().cpu()
        per_token = graph_sizes.repeat_interleave(graph_sizes)
        before = torch.cat((per_token.new_zeros(1), per_token.cumsum(0)))[begin]
    else:
        before = pattern.rowptr[begin.to(pattern.rowptr.device)]
    return tuple(before.diff().tolist())
