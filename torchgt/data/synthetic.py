"""Synthetic patterns of any size with the statistics that matter for speed: degrees, locality, order.

Made block by block, so that memory beyond the result stays bounded; the same arguments give the same graph.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from torchgt.graph import Graph

_BLOCK_PAIRS = 1 << 24
_REACH = 512
_SIGMA = 1.0


def synthetic_graph(num_nodes: int, num_pairs: int, seed: int = 0, local: float = 0.9) -> Graph:
    """A directed graph with log-normal degrees whose ids are in cluster order.

    Args:
        num_nodes: N, at least 1.
        num_pairs: about how many edges; duplicates are removed, so there are a little fewer.
        seed: of everything drawn.
        local: share of the edges that stay within 512 ids of their node; the others go anywhere.

    Returns:
        Graph of N nodes without self-loops.

    Raises:
        ValueError: sizes or shares out of range.
    """
    if num_nodes < 1 or not 0 <= num_pairs <= num_nodes * max(num_nodes - 1, 0) // 2:
        raise ValueError(
            f"num_nodes is {num_nodes} and num_pairs {num_pairs}; allowed: at least 1 node and, so that duplicates "
            f"stay few, at most N (N - 1) / 2 = {num_nodes * max(num_nodes - 1, 0) // 2} pairs"
        )
    if not 0.0 <= local <= 1.0:
        raise ValueError(f"local is {local}; allowed: 0..1")
    degrees = _degrees(num_nodes, num_pairs, seed)
    start = np.concatenate(([0], np.cumsum(degrees)))
    counts = np.zeros(num_nodes + 1, dtype=np.int64)
    blocks = []
    first = 0
    while first < num_nodes:
        last = max(first + 1, int(np.searchsorted(start, start[first] + _BLOCK_PAIRS, side="right")) - 1)
        last = min(last, num_nodes)
        rows, cols = _block(first, degrees[first:last], num_nodes, local, np.random.default_rng([seed, 1, first]))
        counts[first + 1 : last + 1] = np.bincount(rows - first, minlength=last - first)
        blocks.append(cols)
        first = last
    rowptr = torch.from_numpy(np.cumsum(counts))
    return Graph(rowptr, torch.from_numpy(np.concatenate(blocks)), check=False)


def _degrees(num_nodes: int, num_pairs: int, seed: int) -> np.ndarray:
    """Log-normal, scaled to the wanted sum; at most half of the nodes each."""
    weights = np.random.default_rng([seed, 0]).lognormal(0.0, _SIGMA, num_nodes)
    ideal = weights * (num_pairs / weights.sum())
    ideal = np.minimum(ideal, max(num_nodes // 2, 1))
    # Rounding the running sum keeps the total.
    return np.diff(np.rint(np.cumsum(ideal)).astype(np.int64), prepend=0)


def _block(
    first: int, degrees: np.ndarray, num_nodes: int, local: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Rows (int64) and columns (int32 where they fit), sorted, distinct, without loops."""
    rows = np.repeat(np.arange(first, first + len(degrees)), degrees)
    reach = min(_REACH, max(1, math.ceil(num_nodes / 4)))
    near = rows + rng.integers(1, reach + 1, len(rows)) * rng.choice((-1, 1), len(rows))
    cols = np.where(rng.random(len(rows)) < local, near, rng.integers(0, num_nodes, len(rows)))
    cols = np.abs(cols)  # reflected at both ends
    cols = np.where(cols >= num_nodes, 2 * (num_nodes - 1) - cols, cols)
    keys = np.unique((rows * num_nodes + cols)[cols != rows])
    dtype = np.int32 if num_nodes < 2**31 else np.int64
    return keys // num_nodes, (keys % num_nodes).astype(dtype)


__all__ = ["synthetic_graph"]
