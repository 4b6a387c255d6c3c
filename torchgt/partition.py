"""Clusters of a graph, and the token order that keeps each cluster together.

METIS (Karypis and Kumar, "A fast and high quality multilevel scheme for partitioning irregular graphs", 1998) does
the partitioning. It gets a symmetric copy without loops, runs in a child process, and nothing that it reports is
relied on: parts are compacted and the cut is counted here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from torchgt.graph import Graph, count, drop_pairs, to_scipy

log = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("_metis_worker.py")


class PartitionError(RuntimeError):
    """The partitioner failed on a valid request. The message holds what it said, or the signal that ended it."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition of N nodes; tensors int64, on the CPU."""

    assignment: Tensor
    """[N], the part of each node: 0..num_parts-1, none empty."""
    num_parts: int
    """May be less than was asked for."""
    order: Tensor
    """[N], order[new] = old: the nodes part by part, neighbours close to each other within each."""
    inverse: Tensor
    """[N], inverse[old] = new."""
    offsets: Tensor
    """[num_parts + 1]: part p holds the new ids offsets[p] to offsets[p + 1] - 1."""
    edge_cut: int
    """Undirected edges between parts: loops do not count, an edge stored in both directions counts once."""


def partition_graph(g: Graph, num_parts: int, seed: int = 0, cache_dir: str | Path | None = None) -> Partition:
    """Split `g` into about equal parts with few edges between them; direction and loops are ignored.

    The same graph, `num_parts`, `seed` and METIS give the same partition. Parts that METIS leaves empty are removed,
    and more parts than nodes are not made: then `num_parts` of the result is smaller, and a warning is logged. With
    `cache_dir`, results are kept there under `partition_key`. ValueError for arguments out of range;
    PartitionError if METIS fails.
    """
    if not isinstance(g, Graph):
        raise ValueError(f"g is a {type(g).__name__}; expected a torchgt.Graph")
    num_parts, seed = count("num_parts", num_parts, 1), count("seed", seed)
    if seed >= 2**31:
        raise ValueError(f"seed is {seed}; METIS takes 0..{2**31 - 1}")
    both = g.symmetrized(keep_loops=False)
    assignment = _assign(g, both, num_parts, seed, cache_dir)
    if assignment.numel() != g.num_nodes or bool((assignment < 0).any()):
        raise PartitionError(f"the partitioner assigned {assignment.numel()} of {g.num_nodes} nodes")
    _, assignment = torch.unique(assignment, return_inverse=True)
    sizes = torch.bincount(assignment)
    if sizes.numel() < num_parts:
        log.warning("%d parts were asked for, %d made of %d nodes", num_parts, sizes.numel(), g.num_nodes)
    inner, edge_cut = _inside_parts(both, assignment)
    order = _banded_order(inner)
    order = order[torch.argsort(assignment[order], stable=True)]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    return Partition(
        assignment=assignment,
        num_parts=sizes.numel(),
        order=order,
        inverse=inverse,
        offsets=torch.cat((sizes.new_zeros(1), sizes.cumsum(0))),
        edge_cut=edge_cut,
    )


def partition_key(g: Graph, num_parts: int, seed: int) -> str:
    """Names a partition by all that determines it: the graph, the number of parts, the seed, the METIS package."""
    text = f"{g.digest()} {num_parts} {seed} pymetis {version('pymetis')}"
    return hashlib.sha256(text.encode()).hexdigest()


def _assign(g: Graph, both: Graph, num_parts: int, seed: int, cache_dir: str | Path | None) -> Tensor:
    n = g.num_nodes
    if num_parts == 1 or n == 0:
        return torch.zeros(n, dtype=torch.int64)
    if num_parts >= n:
        return torch.arange(n)
    if both.num_edges == 0:
        return torch.arange(n) * num_parts // n
    if cache_dir is None:
        return torch.from_numpy(_run_metis(both, num_parts, seed))
    kept = Path(cache_dir) / f"{partition_key(g, num_parts, seed)}.npy"
    if not kept.exists():
        assignment = _run_metis(both, num_parts, seed)
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, suffix=".part", delete=False) as part:
            np.save(part, assignment)
        os.replace(part.name, kept)
    return torch.from_numpy(np.load(kept))


def _run_metis(both: Graph, num_parts: int, seed: int) -> np.ndarray:
    with tempfile.TemporaryDirectory(prefix="torchgt-metis-") as folder:
        np.save(f"{folder}/rowptr.npy", both.rowptr.numpy())
        np.save(f"{folder}/col.npy", both.col.numpy())
        command = [sys.executable, str(_WORKER), folder, str(num_parts), str(seed)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        if done.returncode < 0:
            raise PartitionError(
                f"METIS was ended by {signal.Signals(-done.returncode).name} (num_parts {num_parts}, {both})"
            )
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
            raise PartitionError(f"METIS failed with exit status {done.returncode}: {said[0]}")
        return np.load(f"{folder}/assignment.npy")


def _inside_parts(both: Graph, assignment: Tensor) -> tuple[Graph, int]:
    """The symmetric graph without the edges between parts, and how many (undirected) those are."""
    part = assignment.to(torch.int32)
    rows = torch.repeat_interleave(part, both.degrees(), output_size=both.num_edges)
    between = (rows != part[both.col]).nonzero().flatten()
    rowptr, keep = drop_pairs(both.rowptr, between)
    return Graph(rowptr, both.col if keep is None else both.col[keep], check=False), between.numel() // 2


def _banded_order(inner: Graph) -> Tensor:
    """All nodes, neighbours near each other: reverse Cuthill-McKee (1969), which is cheap.

    Within clusters of WordNet it needs a third of the 16 x 16 tiles that the order of the ids needs.
    """
    if inner.num_nodes == 0:
        return torch.zeros(0, dtype=torch.int64)
    matrix = to_scipy(inner.rowptr, inner.col, np.ones(inner.num_edges, dtype=np.uint8))
    return torch.from_numpy(sparse.csgraph.reverse_cuthill_mckee(matrix, symmetric_mode=True).astype(np.int64))
