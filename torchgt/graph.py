"""Graphs in compressed rows: `Graph`, and the vectorised row operations that patterns and partitions share.

Legend: N nodes, E stored pairs. Row i lists the nodes j that i receives from (its incoming edges j -> i), which
are the tokens that token i attends to. Everything here runs on the CPU.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# Pairs are sorted by the key row * N + column, which must fit 63 bits.
MAX_NODES = 3_037_000_499


class Graph:
    """A directed graph without duplicate edges, in compressed rows.

    Attributes: `rowptr` int64 [N + 1]; `col` int32 or int64 [E], sorted within each row; `num_nodes`, `num_edges`
    (stored pairs: an undirected edge counts twice, a loop once), `num_duplicates_removed` (by `from_edge_index`).
    A graph is never changed in place.
    """

    def __init__(self, rowptr: Tensor, col: Tensor, num_duplicates_removed: int = 0, check: bool = True):
        """Wrap rows that are already sorted and free of duplicates; ValueError if they are not.

        `check=False` skips the pass over `col`, for arrays that were checked when written and may exceed memory.
        """
        self.rowptr = index_vector("rowptr", rowptr).to(torch.int64)
        col = index_vector("col", col)
        self.col = col if col.dtype in (torch.int32, torch.int64) else col.to(torch.int32)
        self.num_duplicates_removed = num_duplicates_removed
        check_rowptr(self.rowptr, self.col)
        if check:
            check_columns(self.rowptr, self.col, 0, self.num_nodes)

    @classmethod
    def from_edge_index(cls, edge_index: Tensor, num_nodes: int, symmetrize: bool = False) -> Graph:
        """Build from integer [2, E]: `edge_index[0]` is the source j, `edge_index[1]` the target i (row i lists j).

        Repeated edges are merged and counted in `num_duplicates_removed`; direction is kept unless `symmetrize`
        adds every reverse edge. ValueError for a wrong shape or dtype, or an id outside 0..num_nodes-1.
        """
        num_nodes = count("num_nodes", num_nodes)
        if num_nodes > MAX_NODES:
            raise ValueError(f"num_nodes is {num_nodes}; at most {MAX_NODES} nodes can be addressed")
        edge_index = torch.as_tensor(edge_index).cpu()
        if edge_index.ndim != 2 or edge_index.shape[0] != 2:
            raise ValueError(f"edge_index has shape {tuple(edge_index.shape)}; expected [2, E]")
        source, target = (index_vector("edge_index", ids) for ids in edge_index)
        check_range("edge_index", source, 0, num_nodes)
        check_range("edge_index", target, 0, num_nodes)
        # One int64 key a pair, sorted in place: no index array of the size of the graph is needed.
        keys = target.to(torch.int64, copy=True).mul_(num_nodes).add_(source)
        if not bool((keys[1:] >= keys[:-1]).all()):
            keys.numpy().sort()
        first = torch.ones(keys.numel(), dtype=torch.bool)
        torch.ne(keys[1:], keys[:-1], out=first[1:])
        removed = keys.numel() - int(first.sum())
        if removed:
            keys = keys[first]
        rowptr = torch.searchsorted(keys, torch.arange(num_nodes + 1) * num_nodes)
        col = keys.remainder_(num_nodes).to(index_dtype(num_nodes)) if num_nodes else keys.to(torch.int32)
        g = cls(rowptr, col, removed, check=False)
        return g.symmetrized() if symmetrize else g

    @property
    def num_nodes(self) -> int:
        return self.rowptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.col.numel()

    def degrees(self) -> Tensor:
        """Stored pairs of each row, int64 [N]."""
        return self.rowptr.diff()

    def edge_index(self) -> Tensor:
        """int64 [2, E], source above target, in the order of `col`: the inverse of `from_edge_index`."""
        return torch.stack((self.col.to(torch.int64), row_ids(self.rowptr)))

    def subgraph(self, nodes: Tensor) -> Graph:
        """The graph induced on `nodes`, node k of it being `nodes[k]`. ValueError for a repeated or unknown node."""
        nodes = index_vector("nodes", nodes).to(torch.int64)
        check_range("nodes", nodes, 0, self.num_nodes)
        local = torch.full((self.num_nodes,), -1, dtype=torch.int32 if nodes.numel() < 2**31 else torch.int64)
        local[nodes] = torch.arange(nodes.numel(), dtype=local.dtype)
        repeated = local[nodes] != torch.arange(nodes.numel())
        if bool(repeated.any()):
            raise ValueError(f"nodes repeats node {int(nodes[repeated][0])}; each node may occur once")
        rowptr, position = gather_rows(self.rowptr, nodes)
        col = local[self.col[position]]
        inside = col >= 0
        rowptr = torch.cat((rowptr.new_zeros(1), inside.cumsum(0)))[rowptr]
        col = col[inside]
        if bool((nodes[1:] < nodes[:-1]).any()):
            col, _ = sort_rows(rowptr, col, torch.zeros(col.numel(), dtype=torch.uint8))
        return Graph(rowptr, col, check=False)

    def permute(self, order: Tensor) -> Graph:
        """Relabel: node k of the result is node `order[k]` of this graph. ValueError unless a permutation of 0..N-1."""
        order, inverse = permutation("order", order, self.num_nodes)
        rowptr, col, _ = permute_rows(self.rowptr, self.col, order, inverse)
        return Graph(rowptr, col, check=False)

    def transpose(self) -> Graph:
        """Every edge reversed."""
        rowptr, col, _ = transpose_rows(self.rowptr, self.col, index=False)
        return Graph(rowptr, col, check=False)

    def symmetrized(self, keep_loops: bool = True) -> Graph:
        """Every edge in both directions, once each; `keep_loops=False` also leaves out the loops."""
        n = self.num_nodes
        m = to_scipy(self.rowptr, self.col, np.ones(self.num_edges, dtype=np.uint8))
        m = m + m.T.tocsr()
        rowptr, col = torch.from_numpy(m.indptr).to(torch.int64), torch.from_numpy(m.indices).to(index_dtype(n))
        g = Graph(rowptr, col, self.num_duplicates_removed, check=False)
        return g if keep_loops else g.without_loops()

    def without_loops(self) -> Graph:
        """Every edge but those from a node to itself."""
        nodes = torch.arange(self.num_nodes)
        position, found = locate_pairs(self.rowptr, self.col, nodes, nodes)
        rowptr, keep = drop_pairs(self.rowptr, position[found])
        col = self.col if keep is None else self.col[keep]
        return Graph(rowptr, col, self.num_duplicates_removed, check=False)

    def digest(self) -> str:
        """SHA-256 (hex) of the number of nodes and the pairs; the same whatever integer type holds the columns."""
        h = hashlib.sha256(b"torchgt graph 1")
        for array in (self.rowptr, self.col):
            for chunk in array.split(1 << 22):
                h.update(chunk.to(torch.int64).numpy().astype("<i8", copy=False).data)
        return h.hexdigest()

    def __repr__(self) -> str:
        return f"Graph(num_nodes={self.num_nodes}, num_edges={self.num_edges})"


def connected_subset(g: Graph, n: int, seed: int) -> Tensor:
    """Ids (sorted, int64 [n]) of `n` nodes that hang together: the first that a breadth-first search meets.

    The search ignores direction and starts at a random node of the largest component. ValueError if that
    component is smaller than `n`.
    """
    n = count("n", n)
    if n == 0:
        return torch.zeros(0, dtype=torch.int64)
    both = g.symmetrized(keep_loops=False)
    m = to_scipy(both.rowptr, both.col, np.ones(both.num_edges))
    _, component = sparse.csgraph.connected_components(m, directed=False) if g.num_nodes else (0, np.zeros(0, int))
    sizes = np.bincount(component, minlength=1)
    if n > sizes.max():
        raise ValueError(f"n is {n}; the largest connected component has {sizes.max()} of {g.num_nodes} nodes")
    start = np.random.default_rng(seed).choice(np.flatnonzero(component == sizes.argmax()))
    nodes = sparse.csgraph.breadth_first_order(m, start, directed=True, return_predecessors=False)[:n]
    return torch.from_numpy(np.sort(nodes).astype(np.int64))


# Checks. Each raises ValueError with one line.


def count(name: str, value: int, minimum: int = 0) -> int:
    """`value` as an int of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise ValueError(f"{name} is {value!r}; expected an integer >= {minimum}")
    return int(value)


def index_vector(name: str, value: Tensor) -> Tensor:
    """`value` as a one-dimensional integer tensor on the CPU (an empty one of any type is taken)."""
    value = torch.as_tensor(value).cpu()
    if value.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected one dimension")
    if value.dtype not in _INTEGERS:
        if value.numel():
            raise ValueError(f"{name} has dtype {value.dtype}; expected integers")
        value = value.to(torch.int64)
    return value


def check_range(name: str, ids: Tensor, low: int, high: int) -> None:
    """All `ids` in low..high-1."""
    if ids.numel():
        smallest, largest = (int(v) for v in torch.aminmax(ids))
        if smallest < low or largest >= high:
            found = smallest if smallest < low else largest
            allowed = f"{low}..{high - 1}" if high > low else "none"
            raise ValueError(f"{name} contains {found}; allowed: {allowed}")


def check_rowptr(rowptr: Tensor, col: Tensor) -> None:
    """Row pointers start at 0, never fall, and end at the number of columns."""
    if rowptr.numel() == 0 or int(rowptr[0]) != 0:
        raise ValueError(f"rowptr starts with {rowptr[:1].tolist()}; expected N + 1 entries, the first 0")
    falls = rowptr[1:] < rowptr[:-1]
    if bool(falls.any()):
        row = int(falls.nonzero()[0])
        raise ValueError(f"rowptr falls from {int(rowptr[row])} to {int(rowptr[row + 1])} at row {row}; it may not")
    if int(rowptr[-1]) != col.numel():
        raise ValueError(f"rowptr ends with {int(rowptr[-1])}; expected the length of col, {col.numel()}")


def check_columns(rowptr: Tensor, col: Tensor, low: int, high: int) -> None:
    """Columns lie in low..high-1 and rise strictly within each row (one bool a pair of memory)."""
    check_range("col", col, low, high)
    bad = col[1:] <= col[:-1]
    starts = rowptr[1:-1]
    bad[starts[(starts > 0) & (starts < col.numel())] - 1] = False
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        row = int(torch.searchsorted(rowptr, at, right=True)) - 1
        what = "repeats column" if col[at] == col[at + 1] else "is not sorted at column"
        raise ValueError(f"col: row {row} {what} {int(col[at + 1])}; columns must rise strictly within each row")


def permutation(name: str, order: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """`order` (int64 [n], order[new] = old) and its inverse, or ValueError if it is no permutation of 0..n-1."""
    order = index_vector(name, order).to(torch.int64)
    if order.numel() != n:
        raise ValueError(f"{name} has {order.numel()} entries; expected a permutation of {n} nodes")
    check_range(name, order, 0, n)
    inverse = torch.full((n,), -1, dtype=torch.int64)
    inverse[order] = torch.arange(n)
    if bool((inverse < 0).any()):
        missing = int((inverse < 0).nonzero()[0])
        raise ValueError(f"{name} is no permutation: {missing} does not occur in it")
    return order, inverse


# Operations on compressed rows.


def index_dtype(n: int) -> torch.dtype:
    """The type that holds ids below `n`: half the memory wherever 32 bits do."""
    return torch.int32 if n < 2**31 else torch.int64


def to_scipy(rowptr: Tensor, col: Tensor, data: np.ndarray, num_cols: int | None = None) -> sparse.csr_array:
    """A scipy view of the rows (square unless `num_cols`); `col` is not copied where scipy can take its type."""
    n = rowptr.numel() - 1
    return sparse.csr_array((data, col.numpy(), rowptr.numpy()), shape=(n, n if num_cols is None else num_cols))


def row_ids(rowptr: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """The row of each pair, [E]."""
    rows = torch.arange(rowptr.numel() - 1, dtype=dtype, device=rowptr.device)
    return torch.repeat_interleave(rows, rowptr.diff(), output_size=int(rowptr[-1]))


def gather_rows(rowptr: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Row pointers of the chosen rows laid one after the other, and the position in E of each of their pairs."""
    starts, sizes = rowptr[rows], rowptr[rows + 1] - rowptr[rows]
    chosen = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    total = int(chosen[-1])
    position = torch.repeat_interleave(starts - chosen[:-1], sizes, output_size=total)
    return chosen, position.add_(torch.arange(total))


def sort_rows(rowptr: Tensor, col: Tensor, payload: Tensor, num_cols: int | None = None) -> tuple[Tensor, Tensor]:
    """Columns sorted within each row, and `payload` [E] moved along."""
    n = rowptr.numel() - 1
    m = sparse.csr_array((payload.numpy(), col.numpy(), rowptr.numpy()), shape=(n, n if num_cols is None else num_cols))
    m.sort_indices()
    return torch.from_numpy(m.indices).to(col.dtype), torch.from_numpy(m.data)


def permute_rows(rowptr: Tensor, col: Tensor, order: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns relabelled; also the old position of each pair, int64 [E]."""
    rowptr, position = gather_rows(rowptr, order)
    col, position = sort_rows(rowptr, inverse.to(col.dtype)[col[position]], position)
    return rowptr, col, position


def transpose_rows(rowptr: Tensor, col: Tensor, index: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    """The transposed rows, and (if `index`) the old position of each of their pairs, int64 [E]."""
    data = np.arange(col.numel()) if index else np.zeros(col.numel(), dtype=np.uint8)
    m = to_scipy(rowptr, col, data).tocsc()
    position = torch.from_numpy(m.data) if index else None
    return torch.from_numpy(m.indptr).to(torch.int64), torch.from_numpy(m.indices).to(col.dtype), position


def locate_pairs(rowptr: Tensor, col: Tensor, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Where each pair (rows[k], cols[k]) is stored, or would be: position int64 and found bool, both like `rows`.

    A binary search in all the rows at once, so it needs memory for the pairs asked about only.
    """
    start, end = rowptr[rows].numpy(), rowptr[rows + 1].numpy()
    if col.numel() == 0 or start.size == 0:
        return torch.from_numpy(start), torch.zeros(start.size, dtype=torch.bool)
    stored, wanted = col.numpy(), cols.to(col.dtype).numpy()
    # Each step, half as long as the one before, is taken while everything it skips is smaller than what is wanted.
    position = start.copy()
    for bit in reversed(range(int((end - start).max()).bit_length())):
        ahead = position + (1 << bit)
        smaller = stored[np.minimum(ahead, end) - 1] < wanted
        smaller &= ahead <= end
        position = np.where(smaller, ahead, position)
    found = (position < end) & (stored[np.minimum(position, stored.size - 1)] == wanted)
    return torch.from_numpy(position), torch.from_numpy(found)


def insert_pairs(rowptr: Tensor, col: Tensor, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add pairs (sorted by row, then column; none stored yet).

    Returns the new rowptr and col, and a bool [new E] that is True where a pair was stored before.
    """
    position, _ = locate_pairs(rowptr, col, rows, cols)
    position += torch.arange(rows.numel())
    old = torch.ones(col.numel() + rows.numel(), dtype=torch.bool)
    old[position] = False
    merged = torch.empty(old.numel(), dtype=col.dtype)
    merged[position] = cols.to(col.dtype)
    merged.numpy()[old.numpy()] = col.numpy()
    added = torch.bincount(rows, minlength=rowptr.numel() - 1)
    return rowptr + torch.cat((added.new_zeros(1), added.cumsum(0))), merged, old


def drop_pairs(rowptr: Tensor, position: Tensor) -> tuple[Tensor, Tensor | None]:
    """Row pointers without the pairs at `position`, and a bool [E] of the pairs that stay (None: all of them)."""
    if position.numel() == 0:
        return rowptr, None
    keep = torch.ones(int(rowptr[-1]), dtype=torch.bool)
    keep[position] = False
    rows = torch.searchsorted(rowptr, position, right=True) - 1
    dropped = torch.bincount(rows, minlength=rowptr.numel() - 1)
    return rowptr - torch.cat((dropped.new_zeros(1), dropped.cumsum(0))), keep
