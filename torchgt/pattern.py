"""Which token attends to which: `AttentionPattern`, and the conditions C1-C3 under which a sparse one may replace
full attention.

Legend: T tokens (the first G of them global, then N nodes), E stored pairs, H heads. A pair (i, j), stored as
column j of row i, means that token i attends to token j. Global tokens attend to all and are attended by all;
they are a number, not stored pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchgt.conditions import Conditions, check_conditions
from torchgt.graph import (
    Graph,
    check_columns,
    check_rowptr,
    count,
    drop_pairs,
    index_dtype,
    index_vector,
    insert_pairs,
    locate_pairs,
    permutation,
    permute_rows,
    row_ids,
    transpose_rows,
)

__all__ = ["ADDED", "EDGE", "PATH", "SELF", "AttentionPattern", "Conditions", "check_conditions"]

# Pair types of patterns made from a graph. Where several fit, the first does.
SELF, EDGE, PATH, ADDED = range(4)


class AttentionPattern:
    """The pairs of one sequence. Never changed in place; everything derived from it is cached.

    `rowptr` int64 [T + 1], `col` int32 or int64 [E] (token ids, sorted within each row), `pair_type` uint8 [E];
    `num_global`, `num_tokens`, `num_nodes`, `num_types`; `is_full` and `ptr` (see `full`); `has_path`: the pairs
    include a path along the order of the nodes, which `permute` lays anew; `pair_index` int64 [E], on a pattern
    derived from another: the position there of each pair, -1 if new (else None).
    """

    def __init__(
        self,
        rowptr: Tensor | None,
        col: Tensor | None,
        pair_type: Tensor | None,
        *,
        num_global: int,
        num_pair_types: int,
        has_path: bool = False,
        pair_index: Tensor | Callable[[], Tensor] | None = None,
        ptr: Tensor | None = None,
    ):
        """Trusts its arguments; use `from_graph`, `from_pairs` or `full`."""
        self._rowptr, self._col, self._pair_type = rowptr, col, pair_type
        self._pair_index = pair_index
        self.ptr = ptr
        self.num_global = num_global
        self.num_tokens = int(ptr[-1]) if rowptr is None else rowptr.numel() - 1
        self.num_pair_types = num_pair_types
        self.has_path = has_path
        self._cache: dict[str, tuple[Tensor, ...]] = {}

    @classmethod
    def from_graph(
        cls, g: Graph, self_loops: bool = True, num_global: int = 0, hamiltonian_path: bool = False
    ) -> AttentionPattern:
        """Token i attends to the nodes in row i of `g` (edges j -> i).

        `self_loops` adds the missing ones (False keeps the graph's own), `hamiltonian_path` adds both pairs of all
        nodes consecutive in the order. Pair types: 0 self, 1 edge, 2 path.
        """
        if not isinstance(g, Graph):
            raise ValueError(f"g is a {type(g).__name__}; expected a torchgt.Graph")
        num_global = count("num_global", num_global)
        n = g.num_nodes
        pair_type = torch.full((g.num_edges,), EDGE, dtype=torch.uint8)
        loops, found = locate_pairs(g.rowptr, g.col, torch.arange(n), torch.arange(n))
        pair_type[loops[found]] = SELF
        offsets = [0] * bool(self_loops) + [-1, 1] * bool(hamiltonian_path)
        rowptr, col, pair_type, _ = _add_band(g.rowptr, g.col, pair_type, sorted(offsets))
        return cls(
            *_shift(rowptr, col, num_global),
            pair_type,
            num_global=num_global,
            num_pair_types=4,
            has_path=bool(hamiltonian_path),
        )

    @classmethod
    def from_pairs(
        cls,
        rowptr: Tensor,
        col: Tensor,
        pair_type: Tensor | None = None,
        num_global: int = 0,
        num_pair_types: int | None = None,
    ) -> AttentionPattern:
        """From explicit pairs in the form of `rowptr` and `col`: row pointers and columns count tokens, the first
        `num_global` rows are empty and no column points to them.

        `pair_type` [E] holds 0..num_pair_types-1, at most 255 (None: all 0); without `num_pair_types` its maximum
        sets the number. ValueError if pointers fall, columns are out of range, unsorted or repeated.
        """
        num_global = count("num_global", num_global)
        rowptr, col = index_vector("rowptr", rowptr).to(torch.int64), index_vector("col", col)
        check_rowptr(rowptr, col)
        num_tokens = rowptr.numel() - 1
        if num_global > num_tokens:
            raise ValueError(f"num_global is {num_global}; rowptr has rows for {num_tokens} tokens, globals included")
        if int(rowptr[num_global]):
            raise ValueError(
                f"rowptr gives pairs to the first {num_global} rows; those are the global tokens; theirs are not stored"
            )
        check_columns(rowptr, col, num_global, num_tokens)
        pair_type, num_pair_types = _check_types(pair_type, num_pair_types, col.numel())
        col = col.to(index_dtype(num_tokens))
        return cls(rowptr, col, pair_type, num_global=num_global, num_pair_types=num_pair_types)

    @classmethod
    def full(cls, ptr: Tensor, pair_type: Tensor | None = None, num_pair_types: int | None = None) -> AttentionPattern:
        """Complete attention within each of the graphs that `ptr` (int64 [graphs + 1], from 0, never falling) delimits.

        `pair_type` [sum of squared sizes] goes row by row. The pairs are laid out only when `rowptr`, `col` or
        `pair_type` is read: kernels for full attention need none of them.
        """
        ptr = index_vector("ptr", ptr).to(torch.int64)
        if ptr.numel() == 0 or int(ptr[0]) != 0 or bool((ptr[1:] < ptr[:-1]).any()):
            raise ValueError(f"ptr is {_brief(ptr)}; expected graphs + 1 entries that start at 0 and never fall")
        pairs = int(ptr.diff().square().sum())
        if pair_type is None:
            num_pair_types = 1 if num_pair_types is None else count("num_pair_types", num_pair_types, 1)
        else:
            pair_type, num_pair_types = _check_types(pair_type, num_pair_types, pairs)
        return cls(None, None, pair_type, num_global=0, num_pair_types=num_pair_types, ptr=ptr)

    # Sizes. None of these lays out the pairs of a full pattern.

    @property
    def is_full(self) -> bool:
        """Made by `full`: attention is complete within each of the graphs of `ptr`."""
        return self.ptr is not None

    @property
    def num_nodes(self) -> int:
        return self.num_tokens - self.num_global

    @property
    def num_types(self) -> int:
        """Rows of a type bias: the stored types, then "from a global token" (any column), then "to a global token"."""
        return self.num_pair_types + 2

    @property
    def num_pairs(self) -> int:
        """E: stored pairs, those of global tokens excluded."""
        return int(self.ptr.diff().square().sum()) if self._col is None else self._col.numel()

    @property
    def num_pairs_computed(self) -> int:
        """Pairs that an implementation computes: the stored ones, and rows and columns of the global tokens."""
        return self.num_pairs + self.num_global * (2 * self.num_tokens - self.num_global)

    @property
    def density(self) -> float:
        """E / N squared (0 without nodes)."""
        return self.num_pairs / self.num_nodes**2 if self.num_nodes else 0.0

    @property
    def device(self) -> torch.device:
        return (self.ptr if self._rowptr is None else self._rowptr).device

    # Pairs.

    @property
    def rowptr(self) -> Tensor:
        if self._rowptr is None:
            self._rowptr, self._col = _full_rows(self.ptr)
        return self._rowptr

    @property
    def col(self) -> Tensor:
        if self._col is None:
            self._rowptr, self._col = _full_rows(self.ptr)
        return self._col

    @property
    def pair_type(self) -> Tensor:
        if self._pair_type is None:
            self._pair_type = torch.zeros(self.num_pairs, dtype=torch.uint8, device=self.device)
        return self._pair_type

    @property
    def pair_index(self) -> Tensor | None:
        if callable(self._pair_index):
            self._pair_index = self._pair_index()
        return self._pair_index

    def row_ids(self) -> Tensor:
        """The row of each pair, like `col`."""
        return row_ids(self.rowptr, self.col.dtype)

    def transposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """The stored pairs by column: rowptr int64 [T + 1], their rows (like `col`), their positions in E (int64)."""
        if "transposed" not in self._cache:
            parts = transpose_rows(self.rowptr.cpu(), self.col.cpu())
            self._cache["transposed"] = tuple(part.to(self.device) for part in parts)
        return self._cache["transposed"]

    def with_globals_as_pairs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Every computed pair stored, for implementations that know no global tokens.

        Returns rowptr int64 [T + 1], col [P], the row of the type bias uint8 or int16 [P] and the position in E
        int64 [P], -1 for pairs of a global token, where P is `num_pairs_computed`.
        """
        if "globals" not in self._cache:
            self._cache["globals"] = self._lay_globals()
        return self._cache["globals"]

    def _lay_globals(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        g, t, device = self.num_global, self.num_tokens, self.device
        here = torch.arange(self.num_pairs, device=device)
        if g == 0:
            return self.rowptr, self.col, self.pair_type, here
        extra = torch.arange(t + 1, device=device) * g
        extra[: g + 1] = torch.arange(g + 1, device=device) * t
        extra[g + 1 :] += extra[g] - g * g
        rowptr = self.rowptr + extra
        total = self.num_pairs_computed
        # A stored pair moves behind the global columns of its own row and of all rows before it.
        target = here + torch.repeat_interleave(extra[1:], self.rowptr.diff(), output_size=self.num_pairs)
        front = (rowptr[g:-1, None] + torch.arange(g, device=device)).flatten()
        col = torch.empty(total, dtype=self.col.dtype, device=device)
        col[: g * t] = torch.arange(t, dtype=col.dtype, device=device).repeat(g)
        col[front] = torch.arange(g, dtype=col.dtype, device=device).repeat(t - g)
        col[target] = self.col
        kind = torch.empty(total, dtype=torch.uint8 if self.num_types <= 256 else torch.int16, device=device)
        kind[: g * t] = self.num_types - 2
        kind[front] = self.num_types - 1
        kind[target] = self.pair_type.to(kind.dtype)
        index = torch.full((total,), -1, dtype=torch.int64, device=device)
        index[target] = here
        return rowptr, col, kind, index

    def to_dense(self) -> Tensor:
        """bool [T, T], True where row attends to column; rows and columns of global tokens included."""
        dense = torch.zeros(self.num_tokens, self.num_tokens, dtype=torch.bool, device=self.device)
        dense[self.row_ids().long(), self.col.long()] = True
        dense[: self.num_global] = True
        dense[:, : self.num_global] = True
        return dense

    # Derived patterns.

    def permute(self, order: Tensor) -> AttentionPattern:
        """The same attention with node k of the result being node `order[k]` of this (global tokens stay first).

        Path pairs are not moved: they are laid anew between nodes consecutive in the new order. `pair_index` of the
        result points into this pattern. ValueError unless `order` is a permutation of the nodes.
        """
        order, inverse = permutation("order", order, self.num_nodes)
        if self.is_full:
            ptr = _permuted_ptr(self.ptr.cpu(), order)
            if ptr is not None:
                return self._permute_full(ptr, order)
        g = self.num_global
        rowptr, col = self.rowptr.cpu()[g:], self.col.cpu() - g
        rowptr, col, index = permute_rows(rowptr, col, order, inverse)
        pair_type = self.pair_type.cpu()[index]
        if self.has_path:
            path = (pair_type == PATH).nonzero().flatten()
            rows = torch.searchsorted(rowptr, path, right=True) - 1
            rowptr, keep = drop_pairs(rowptr, path[(col[path] - rows).abs() != 1])
            if keep is not None:
                col, pair_type, index = col[keep], pair_type[keep], index[keep]
            rowptr, col, pair_type, old = _add_band(rowptr, col, pair_type, [-1, 1])
            if old is not None:
                index = torch.full((col.numel(),), -1).masked_scatter_(old, index)
        return AttentionPattern(
            *_shift(rowptr, col, g),
            pair_type,
            num_global=g,
            num_pair_types=self.num_pair_types,
            has_path=self.has_path,
            pair_index=index,
        ).to(self.device)

    def _permute_full(self, ptr: Tensor, order: Tensor) -> AttentionPattern:
        """Whole graphs stay whole: the result is full too, and lays out nothing either unless it has pair types."""

        def pair_index() -> Tensor:
            rowptr, col = _full_rows(ptr)
            first = self.ptr.cpu()
            graph = torch.searchsorted(first, torch.arange(self.num_tokens), right=True) - 1
            sizes = first.diff()
            # Position of column 0 of each old row, were its graph's columns counted from token 0.
            base = sizes.square().cumsum(0) - sizes.square()
            start = base[graph] + (torch.arange(self.num_tokens) - first[graph]) * sizes[graph] - first[graph]
            return torch.repeat_interleave(start[order], rowptr.diff()) + order[col]

        out = AttentionPattern(
            None,
            None,
            None,
            num_global=0,
            num_pair_types=self.num_pair_types,
            pair_index=pair_index,
            ptr=ptr,
        )
        if self._pair_type is not None:
            out._pair_type = self._pair_type.cpu()[out.pair_index]
        return out.to(self.device)

    def to(self, device: torch.device | str) -> AttentionPattern:
        """The pattern with all its arrays on `device` (itself if they are)."""
        device = torch.device(device)
        if self.device == device:
            return self
        moved = AttentionPattern(
            *(None if part is None else part.to(device) for part in (self._rowptr, self._col, self._pair_type)),
            num_global=self.num_global,
            num_pair_types=self.num_pair_types,
            has_path=self.has_path,
            pair_index=None if self._pair_index is None else lambda: self.pair_index.to(device),
            ptr=None if self.ptr is None else self.ptr.to(device),
        )
        moved._cache = {key: tuple(part.to(device) for part in parts) for key, parts in self._cache.items()}
        return moved

    def __repr__(self) -> str:
        full = ", full" if self.is_full else ""
        sizes = f"num_tokens={self.num_tokens}, num_global={self.num_global}, num_pairs={self.num_pairs}"
        return f"AttentionPattern({sizes}{full})"


def _shift(rowptr: Tensor, col: Tensor, num_global: int) -> tuple[Tensor, Tensor]:
    """Rows over nodes as rows over tokens: empty rows for the global tokens first, columns counted after them."""
    col = col.to(index_dtype(rowptr.numel() - 1 + num_global))
    return (torch.cat((rowptr.new_zeros(num_global), rowptr)), col + num_global) if num_global else (rowptr, col)


def _add_band(
    rowptr: Tensor, col: Tensor, pair_type: Tensor, offsets: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Add the pairs (i, i + offset) that are not stored: type self for offset 0, path otherwise.

    Returns the new rows and types, and a bool [new E], True where a pair was stored before (None: nothing added).
    """
    n = rowptr.numel() - 1
    rows = torch.arange(n).repeat_interleave(len(offsets))
    cols = rows + torch.tensor(offsets, dtype=torch.int64).repeat(n)
    valid = (cols >= 0) & (cols < n)
    rows, cols = rows[valid], cols[valid]
    _, found = locate_pairs(rowptr, col, rows, cols)
    rows, cols = rows[~found], cols[~found]
    if rows.numel() == 0:
        return rowptr, col, pair_type, None
    rowptr, col, old = insert_pairs(rowptr, col, rows, cols)
    merged = torch.empty(col.numel(), dtype=torch.uint8)
    merged.numpy()[old.numpy()] = pair_type.numpy()
    merged.numpy()[~old.numpy()] = torch.where(rows == cols, SELF, PATH).numpy()
    return rowptr, col, merged, old


def _check_types(pair_type: Tensor | None, num_pair_types: int | None, pairs: int) -> tuple[Tensor | None, int]:
    """uint8 types and their number. No types means one, or as many as the caller says, all pairs being of type 0."""
    if num_pair_types is not None:
        num_pair_types = count("num_pair_types", num_pair_types, 1)
    if pair_type is None:
        return None, num_pair_types or 1
    pair_type = index_vector("pair_type", pair_type)
    if pair_type.numel() != pairs:
        raise ValueError(f"pair_type has shape {tuple(pair_type.shape)}; expected [{pairs}], one for each pair")
    low, high = (int(v) for v in torch.aminmax(pair_type)) if pairs else (0, 0)
    limit = 256 if num_pair_types is None else min(num_pair_types, 256)
    if low < 0 or high >= limit:
        raise ValueError(f"pair_type contains {low if low < 0 else high}; allowed: 0..{limit - 1}")
    return pair_type.to(torch.uint8), num_pair_types or high + 1


def _full_rows(ptr: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of complete graphs, as rows."""
    sizes = ptr.diff()
    row_sizes = torch.repeat_interleave(sizes, sizes)
    rowptr = torch.cat((row_sizes.new_zeros(1), row_sizes.cumsum(0)))
    n = rowptr.numel() - 1
    dtype = index_dtype(n)
    if sizes.numel() == 1:
        return rowptr, torch.arange(n, dtype=dtype, device=ptr.device).repeat(n)
    first = torch.repeat_interleave(ptr[:-1], sizes)
    back = torch.repeat_interleave(rowptr[:-1] - first, row_sizes)
    return rowptr, torch.arange(back.numel(), device=ptr.device).sub_(back).to(dtype)


def _permuted_ptr(ptr: Tensor, order: Tensor) -> Tensor | None:
    """Where the graphs lie in the new order, or None if it tears one apart. Graphs without nodes are left out."""
    graph = (torch.searchsorted(ptr, torch.arange(order.numel()), right=True) - 1)[order]
    starts = (graph[1:] != graph[:-1]).nonzero().flatten() + 1
    if order.numel() == 0:
        return ptr
    if starts.numel() + 1 != int((ptr.diff() > 0).sum()):
        return None
    return torch.cat((starts.new_zeros(1), starts, starts.new_tensor([order.numel()])))


def _brief(values: Tensor) -> str:
    return str(values.tolist()) if values.numel() <= 8 else f"{values[:8].tolist()[:-1]}..."
