"""Whether a sparse attention pattern can stand in for full attention: conditions C1-C3.

After Yun et al., "O(n) Connections are Expressive Enough" (NeurIPS 2020): every token attends to itself (C1), the
pattern holds a Hamiltonian path (C2), and information gets from every token to every other within the model's
layers (C3). An answer of True or False is backed by a certificate; None means that none was found.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from torchgt.graph import Graph, count, locate_pairs, to_scipy

if TYPE_CHECKING:
    from torchgt.pattern import AttentionPattern

# Sources whose breadth-first searches bound the eccentricities of all others before every pair is tried.
_PIVOTS = 16
# Working memory of the exact search over all pairs.
_BATCH_BYTES = 256 << 20
# Beyond this, the searches that walk node by node would take minutes and gigabytes.
_WALK_PAIRS = 20_000_000
_GREEDY_STARTS = 8


@dataclass(frozen=True)
class Conditions:
    """The answers for one pattern and depth; `reasons` holds one line for each of C1, C2, C3."""

    self_loops: bool
    hamiltonian_path: bool | None
    reachable: bool | None
    reasons: tuple[str, str, str]

    @property
    def satisfied(self) -> bool:
        return self.self_loops is True and self.hamiltonian_path is True and self.reachable is True


def check_conditions(a: AttentionPattern, num_layers: int, time_limit: float = 60.0) -> Conditions:
    """C1, C2 and C3 of pattern `a` under a model of `num_layers` layers. Global tokens count.

    The path of C2 runs along pairs in one direction. C3 is decided exactly unless `time_limit` seconds run out;
    C2 searches for a path, and for a proof that there is none, for as long at most.
    """
    num_layers = count("num_layers", num_layers, 1)
    if not time_limit > 0:
        raise ValueError(f"time_limit is {time_limit!r}; expected seconds > 0")
    c1, why1 = _self_loops(a)
    c2, why2 = _hamiltonian_path(a, time.monotonic() + time_limit)
    c3, why3 = _reachable(a, num_layers, time.monotonic() + time_limit)
    return Conditions(c1, c2, c3, (f"C1: {why1}", f"C2: {why2}", f"C3: {why3}"))


# C1


def _self_loops(a: AttentionPattern) -> tuple[bool, str]:
    if a.is_full:
        return True, "attention is complete within each graph"
    rowptr, col = _node_rows(a)
    nodes = torch.arange(a.num_nodes)
    _, found = locate_pairs(rowptr, col, nodes, nodes)
    missing = a.num_nodes - int(found.sum())
    return (
        not missing,
        f"{missing} of {a.num_nodes} nodes lack a self-loop" if missing else "every token has a self-loop",
    )


# C2. Global tokens join anything, so a path over all tokens exists exactly if the nodes fall into at most
# num_global + 1 disjoint paths. `paths` is that number.


def _hamiltonian_path(a: AttentionPattern, deadline: float) -> tuple[bool | None, str]:
    n, paths = a.num_nodes, a.num_global + 1
    if a.has_path:
        return True, "the pattern was built with a path along the order"
    if n <= paths:
        return True, "global tokens join all nodes" if a.num_global else "there is at most one token"
    if a.is_full:
        graphs = int((a.ptr.diff() > 0).sum())
        return graphs == 1, "attention is complete" if graphs == 1 else f"disconnected: {graphs} graphs"
    arcs = Graph(*_node_rows(a), check=False).without_loops()
    breaks = min(_breaks_along_order(arcs))
    if breaks < paths:
        joined = f", {breaks} gaps being closed by global tokens" if breaks else ""
        return True, f"consecutive tokens attend to each other along the order{joined}"
    both = arcs.symmetrized()
    proof = _counting_proof(arcs, both, paths)
    if proof:
        return False, proof
    if both.num_edges > _WALK_PAIRS:
        return None, f"too large for a search (more than {_WALK_PAIRS} pairs)"
    proof = _cut_vertex_proof(both, paths, deadline)
    if proof:
        return False, proof
    if _greedy_paths(arcs, paths, deadline):
        return True, "a search found a path"
    return None, "found neither a path nor a proof that there is none"


def _breaks_along_order(arcs: Graph) -> tuple[int, int]:
    """How often i does not attend to i + 1, and how often i + 1 does not attend to i."""
    first = torch.arange(arcs.num_nodes - 1)
    _, ahead = locate_pairs(arcs.rowptr, arcs.col, first, first + 1)
    _, behind = locate_pairs(arcs.rowptr, arcs.col, first + 1, first)
    return int((~ahead).sum()), int((~behind).sum())


def _counting_proof(arcs: Graph, both: Graph, paths: int) -> str | None:
    """A proof by counting that `paths` disjoint paths do not cover the nodes, or None."""
    allowed = f"; {paths - 1} global tokens allow" if paths > 1 else "; a path allows"
    adjacency = to_scipy(both.rowptr, both.col, np.ones(both.num_edges, dtype=np.uint8))
    components = sparse.csgraph.connected_components(adjacency, directed=False, return_labels=False)
    if components > paths:
        return f"disconnected: {components} components{allowed} {paths}"
    # A leaf is one end of its path, an isolated node both.
    degrees = both.degrees()
    ends = int((2 - degrees.clamp(max=2)).sum())
    if ends > 2 * paths:
        leaves, isolated = int((degrees == 1).sum()), int((degrees == 0).sum())
        return f"{leaves} leaves and {isolated} isolated nodes{allowed} {2 * paths} ends"
    attended = torch.bincount(arcs.col, minlength=arcs.num_nodes)
    for what, degrees in (("attend to no other", arcs.degrees()), ("are attended to by no other", attended)):
        dead = int((degrees == 0).sum())
        if dead > paths:
            return f"{dead} nodes {what}{allowed} {paths} such"
    return None


def _cut_vertex_proof(both: Graph, paths: int, deadline: float) -> str | None:
    """A node whose removal leaves more than `paths` + 1 components, if there is one and time suffices.

    Taking one node out of `paths` paths leaves at most `paths` + 1. Tarjan's depth-first search, without recursion:
    a child that reaches nothing above its parent is a component of its own once the parent is gone.
    """
    rowptr, col = both.rowptr.tolist(), both.col.tolist()
    n = both.num_nodes
    next_pair, found, low, parent = rowptr[:-1], [0] * n, [0] * n, [-1] * n
    pieces = [0] * n
    clock = roots = 0
    for root in range(n):
        if found[root]:
            continue
        roots += 1
        clock += 1
        found[root] = low[root] = clock
        node = root
        while node >= 0:
            at = next_pair[node]
            if at < rowptr[node + 1]:
                next_pair[node] = at + 1
                other = col[at]
                if not found[other]:
                    clock += 1
                    found[other] = low[other] = clock
                    parent[other] = node
                    node = other
                    if clock % 4096 == 0 and time.monotonic() > deadline:
                        return None
                elif found[other] < low[node] and other != parent[node]:
                    low[node] = found[other]
            else:
                above = parent[node]
                if above >= 0:
                    low[above] = min(low[above], low[node])
                    pieces[above] += low[node] >= found[above]
                node = above
    # The rest of a node's own component is a piece too, unless the search began there.
    worst = max(range(n), key=lambda node: pieces[node] + (parent[node] >= 0))
    left = roots - 1 + pieces[worst] + (parent[worst] >= 0)
    return f"without node {worst} {left} components remain; at most {paths + 1} may" if left > paths + 1 else None


def _greedy_paths(arcs: Graph, paths: int, deadline: float) -> bool:
    """Whether a greedy walk covers the nodes with at most `paths` paths: always on to the node with the fewest ways
    out (Warnsdorff's rule), starting where the fewest ways lead in. Tries a few starts."""
    rowptr, col = arcs.rowptr.tolist(), arcs.col.tolist()
    back = arcs.transpose()
    back_rowptr, back_col = back.rowptr.tolist(), back.col.tolist()
    starts = torch.argsort(back.degrees(), stable=True).tolist()
    for attempt in range(min(_GREEDY_STARTS, len(starts))):
        ways_out = arcs.degrees().tolist()
        visited = [False] * arcs.num_nodes
        used = steps = 0
        for start in (starts[attempt], *starts):
            if visited[start]:
                continue
            used += 1
            if used > paths:
                break
            node = start
            while node is not None:
                visited[node] = True
                steps += 1
                if steps % 4096 == 0 and time.monotonic() > deadline:
                    return False
                for other in back_col[back_rowptr[node] : back_rowptr[node + 1]]:
                    ways_out[other] -= 1
                ahead = [other for other in col[rowptr[node] : rowptr[node + 1]] if not visited[other]]
                node = min(ahead, key=ways_out.__getitem__, default=None)
        if used <= paths:
            return True
    return False


# C3. No search goes deeper than the number of layers, so one that misses a token settles the matter.


def _reachable(a: AttentionPattern, num_layers: int, deadline: float) -> tuple[bool | None, str]:
    n = a.num_nodes
    if n == 0 or (n == 1 and a.num_global == 0):
        return True, "there is no other token to reach"
    if a.num_global and num_layers >= 2:
        return True, "every token reaches every other over a global token in 2 hops"
    if a.is_full:
        graphs = int((a.ptr.diff() > 0).sum())
        return graphs == 1, "attention is complete" if graphs == 1 else f"disconnected: {graphs} graphs"
    arcs = Graph(*_node_rows(a), check=False).without_loops()
    missing = n * (n - 1) - arcs.num_edges
    if missing == 0:
        return True, "every token attends to every other"
    if num_layers == 1:
        return False, f"{missing} pairs of tokens are more than 1 hop apart"
    rowptr, col = arcs.rowptr.numpy(), arcs.col.numpy()
    back = arcs.transpose()
    source, target, open_targets = _pivots(rowptr, col, back.rowptr.numpy(), back.col.numpy(), num_layers, deadline)
    if source is None and open_targets.size:
        answer = _all_reach(rowptr, col, open_targets, num_layers, deadline)
        if answer is None:
            return None, "not decided within the time limit"
        source, target = answer
    if source is not None:
        return False, f"token {source + a.num_global} does not reach token {target + a.num_global} in {num_layers} hops"
    return True, f"every token reaches every other in {num_layers} hops"


def _distances(rowptr: np.ndarray, col: np.ndarray, source: int, depth: int) -> np.ndarray:
    """Hops from `source` along the rows, int32 [N], -1 beyond `depth`."""
    distance = np.full(rowptr.size - 1, -1, dtype=np.int32)
    distance[source] = 0
    frontier = np.array([source])
    for level in range(1, depth + 1):
        starts, ends = rowptr[frontier], rowptr[frontier + 1]
        sizes = ends - starts
        offsets = np.cumsum(sizes) - sizes
        reached = col[np.arange(sizes.sum()) + np.repeat(starts - offsets, sizes)]
        frontier = np.unique(reached[distance[reached] < 0])
        if frontier.size == 0:
            break
        distance[frontier] = level
    return distance


def _pivots(
    rowptr: np.ndarray, col: np.ndarray, back_rowptr: np.ndarray, back_col: np.ndarray, depth: int, deadline: float
) -> tuple[int | None, int | None, np.ndarray]:
    """Searches from and to a few nodes: a pair farther apart than `depth` (or None, None) and the nodes for which
    it is still open whether all others reach them.

    For a pivot v, no node is farther from i than (the farthest from v) + (v to i): the bounds of Takes and Kosters,
    "Determining the diameter of small world networks" (CIKM 2011), for directed graphs.
    """
    n = rowptr.size - 1
    upper = np.full(n, np.iinfo(np.int32).max, dtype=np.int32)
    lower = np.zeros(n, dtype=np.int32)
    tried = np.zeros(n, dtype=bool)
    pivot = int(np.argmax(np.diff(rowptr) + np.diff(back_rowptr)))
    for turn in range(min(_PIVOTS, n)):
        tried[pivot] = True
        ahead, behind = _distances(rowptr, col, pivot, depth), _distances(back_rowptr, back_col, pivot, depth)
        if (ahead < 0).any():
            return pivot, int(np.argmin(ahead)), upper
        if (behind < 0).any():
            return int(np.argmin(behind)), pivot, upper
        np.minimum(upper, behind.max() + ahead, out=upper)
        np.maximum(lower, ahead, out=lower)
        upper[pivot] = behind.max()
        open_ = upper > depth
        if not open_.any() or tried.all() or time.monotonic() > deadline:
            break
        # In turn the most remote node, which may refute, and the most central one, which may bound many.
        score = np.where(tried, -1, upper) if turn % 2 == 0 else np.where(tried, np.iinfo(np.int32).min, -lower)
        pivot = int(np.argmax(score))
    remaining = np.flatnonzero(upper > depth)
    # The most remote first: a pair that is too far apart shows in the first batch.
    return None, None, remaining[np.argsort(-upper[remaining], kind="stable")]


def _all_reach(
    rowptr: np.ndarray, col: np.ndarray, targets: np.ndarray, depth: int, deadline: float
) -> tuple[int | None, int | None] | None:
    """A token and a target that it does not reach within `depth` hops, (None, None) if there is none, or None when
    time is up. Bit t of a node says that it reaches target t; a hop is an OR over the node's row."""
    n = rowptr.size - 1
    words = max(1, min(_BATCH_BYTES // (8 * (n + col.size)), -(-targets.size // 64)))
    rows = np.flatnonzero(np.diff(rowptr))
    for batch in np.array_split(targets, -(-targets.size // (64 * words))):
        bit = np.arange(batch.size)
        state = np.zeros((n, words), dtype=np.uint64)
        state[batch, bit // 64] = np.uint64(1) << (bit % 64).astype(np.uint64)
        want = np.bitwise_or.reduce(state, axis=0)
        for _ in range(depth):
            if time.monotonic() > deadline:
                return None
            state[rows] |= np.bitwise_or.reduceat(state[col], rowptr[rows], axis=0)
            if (state == want).all():
                break
        else:
            source, word = (int(v[0]) for v in np.nonzero(state != want))
            lost = int(want[word] & ~state[source, word])
            return source, int(batch[word * 64 + (lost & -lost).bit_length() - 1])
    return None, None


# Shared.


def _node_rows(a: AttentionPattern) -> tuple[Tensor, Tensor]:
    """The pattern's rows and columns over nodes, global tokens left out."""
    g = a.num_global
    return a.rowptr.cpu()[g:], a.col.cpu() - g if g else a.col.cpu()
