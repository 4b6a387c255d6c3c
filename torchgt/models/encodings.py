"""Structural encodings of graphs: distances, degrees, Laplacian eigenvectors.

Distances follow the pattern's direction: a step leads from i to j if the graph's row i holds j.
"""

from __future__ import annotations

import graphlib
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
import scipy.sparse.linalg
import torch

if TYPE_CHECKING:
    from torchgt.graph import Graph

_EIGH_NODES = 2048  # up to here a dense eigendecomposition is quick and needs no convergence
_BLOCK_BYTES = 64 << 20  # memory for the gathered rows of one block


def num_distance_types(max_distance: int) -> int:
    """How many ids `shortest_path_types` uses: 0..max_distance, farther, unreachable, padding."""
    if isinstance(max_distance, bool) or not isinstance(max_distance, int) or not 0 <= max_distance <= 252:
        raise ValueError(f"max_distance: expected an integer in 0..252 (ids are bytes), found {max_distance!r}")
    return max_distance + 4


def padding_type(max_distance: int) -> int:
    """The id for entries that stand for no pair of nodes at all."""
    return num_distance_types(max_distance) - 1


def shortest_path_types(graph: Graph, max_distance: int) -> torch.Tensor:
    """Steps from every node to every other, uint8 [N, N], clipped: a bias per distance (Graphormer, Ying et al. 2021).

    Ids 0..max_distance are distances, max_distance + 1 means farther, max_distance + 2 unreachable; max_distance + 3 is
    kept free for padding (`padding_type`). Raises ValueError for a max_distance outside 0..252.
    """
    farther, unreachable = num_distance_types(max_distance) - 3, num_distance_types(max_distance) - 2
    num_nodes = graph.num_nodes
    if num_nodes == 0:
        return torch.empty((0, 0), dtype=torch.uint8)
    # One bit a pair: row i holds the nodes reached from i, so a whole step for all sources is an OR of rows.
    reached = _pack(np.eye(num_nodes, dtype=bool))
    types = np.full((num_nodes, num_nodes), unreachable, dtype=np.uint8)
    np.fill_diagonal(types, 0)
    for distance in range(1, max_distance + 1):
        wider = _one_step(graph, reached)
        fresh = wider & ~reached
        if not fresh.any():
            return torch.from_numpy(types)
        types[_unpack(fresh, num_nodes)] = distance
        reached = wider
    types[_unpack(_closure(graph) & ~reached, num_nodes)] = farther
    return torch.from_numpy(types)


def _pack(bits: np.ndarray) -> np.ndarray:
    """bool [R, N] as uint64 [R, N / 64 rounded up]: whole words make the ORs below eight times as fast as bytes."""
    packed = np.packbits(bits, axis=1)
    return np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8))).view(np.uint64)


def _unpack(words: np.ndarray, num_nodes: int) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), axis=1, count=num_nodes).view(bool)


def _one_step(graph: Graph, reached: np.ndarray) -> np.ndarray:
    """Adds to each row what its neighbours' rows hold; a block of rows at a time bounds the gathered memory."""
    rowptr, col = graph.rowptr.numpy(), graph.col.numpy()
    wider = reached.copy()
    if len(col) == 0:
        return wider
    rows = np.flatnonzero(np.diff(rowptr))  # reduceat would give an empty row its successor's value
    edges_per_block = max(1, _BLOCK_BYTES // reached[0].nbytes)
    begin = 0
    while begin < len(rows):
        first = rowptr[rows[begin]]
        end = max(begin + 1, int(np.searchsorted(rowptr[rows + 1], first + edges_per_block, side="right")))
        block = rows[begin:end]
        gathered = reached[col[first : rowptr[block[-1] + 1]]]
        wider[block] |= np.bitwise_or.reduceat(gathered, rowptr[block] - first, axis=0)
        begin = end
    return wider


def _closure(graph: Graph) -> np.ndarray:
    """Bits (see `_pack`) of everything reachable in any number of steps, at a cost that no diameter raises.

    Nodes of one strong component reach the same; a component reaches itself and whatever its successors reach.
    """
    adjacency = _adjacency(graph).tocoo()
    count, component = scipy.sparse.csgraph.connected_components(adjacency, connection="strong")
    reached = _pack(component[None, :] == np.arange(count)[:, None])
    successors: dict[int, set[int]] = {}
    for here, there in zip(component[adjacency.row].tolist(), component[adjacency.col].tolist(), strict=True):
        if here != there:
            successors.setdefault(here, set()).add(there)
    for here in graphlib.TopologicalSorter(successors).static_order():  # successors come first
        for there in successors.get(here, ()):
            reached[here] |= reached[there]
    return reached[component]


def _adjacency(graph: Graph) -> scipy.sparse.csr_matrix:
    ones = np.ones(graph.col.numel())
    shape = (graph.num_nodes, graph.num_nodes)
    return scipy.sparse.csr_matrix((ones, graph.col.numpy(), graph.rowptr.numpy()), shape=shape)


def degree_encoding(graph: Graph, max_degree: int = 511) -> torch.Tensor:
    """Entries of each node's row, at most `max_degree`: int64 [N], an index into a table of max_degree + 1 rows."""
    if isinstance(max_degree, bool) or not isinstance(max_degree, int) or max_degree < 0:
        raise ValueError(f"max_degree: expected an integer of at least 0, found {max_degree!r}")
    return graph.rowptr.diff().clamp(max=max_degree)


def laplacian_encoding(graph: Graph, k: int) -> torch.Tensor:
    """The k eigenvectors after the first of I - D^-1/2 A D^-1/2, by rising eigenvalue: float32 [N, k].

    A is the graph made symmetric, without self-loops; rows of isolated nodes count as A = 0. Each vector's largest
    entry is positive, which fixes the sign. A graph of N nodes has N - 1 such vectors; the columns beyond are zero.
    After Dwivedi and Bresson 2021, "A Generalization of Transformer Networks to Graphs".
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 0:
        raise ValueError(f"k: expected an integer of at least 0, found {k!r}")
    num_nodes = graph.num_nodes
    encoding = np.zeros((num_nodes, k), dtype=np.float32)
    count = min(k, num_nodes - 1)
    if count > 0:
        vectors = _smallest_eigenvectors(_normalised_laplacian(graph), count + 1)[:, 1:]
        largest = vectors[np.abs(vectors).argmax(0), np.arange(count)]
        encoding[:, :count] = vectors * np.where(largest < 0, -1.0, 1.0)
    return torch.from_numpy(encoding)


def _normalised_laplacian(graph: Graph) -> scipy.sparse.csr_matrix:
    adjacency = _adjacency(graph)
    adjacency = adjacency.maximum(adjacency.T).tocoo()
    keep = adjacency.row != adjacency.col
    adjacency = scipy.sparse.csr_matrix(
        (adjacency.data[keep], (adjacency.row[keep], adjacency.col[keep])), shape=adjacency.shape
    )
    degree = np.asarray(adjacency.sum(1)).ravel()
    scale = scipy.sparse.diags(1.0 / np.sqrt(np.maximum(degree, 1.0)))
    return (scipy.sparse.identity(graph.num_nodes) - scale @ adjacency @ scale).tocsr()


def _smallest_eigenvectors(laplacian: scipy.sparse.csr_matrix, count: int) -> np.ndarray:
    """Orthonormal eigenvectors of the `count` smallest eigenvalues, ascending."""
    num_nodes = laplacian.shape[0]
    if num_nodes <= _EIGH_NODES or count >= num_nodes // 2:
        return np.linalg.eigh(laplacian.toarray())[1][:, :count]
    # The spectrum lies in [0, 2]; the smallest of L are the largest of 2 I - L, which Lanczos finds without a solve.
    # A fixed start vector makes the result reproducible.
    start = np.random.default_rng(0).standard_normal(num_nodes)
    flipped = 2.0 * scipy.sparse.identity(num_nodes) - laplacian
    values, vectors = scipy.sparse.linalg.eigsh(flipped, k=count, which="LA", v0=start)
    return vectors[:, np.argsort(-values)]
