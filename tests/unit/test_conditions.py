"""C1-C3 against exhaustive answers on small patterns, and the certificates one by one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import torchgt
from torchgt import conditions
from torchgt.conditions import check_conditions
from torchgt.graph import Graph
from torchgt.pattern import AttentionPattern


def pattern(edges, n, num_global=0, **keywords) -> AttentionPattern:
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T
    return AttentionPattern.from_graph(
        Graph.from_edge_index(edge_index, n, symmetrize=True), num_global=num_global, **keywords
    )


def path(n):
    return [(i, i + 1) for i in range(n - 1)]


def has_hamiltonian_path(dense: torch.Tensor) -> bool:
    """Held and Karp: which ends a directed path over each set of tokens can have."""
    n = len(dense)
    ways_out = [sum(1 << j for j in range(n) if dense[i, j]) for i in range(n)]
    ends = [0] * (1 << n)
    for i in range(n):
        ends[1 << i] = 1 << i
    for used in range(1 << n):
        for i in range(n):
            if ends[used] >> i & 1:
                for j in range(n):
                    if ways_out[i] & ~used & (1 << j):
                        ends[used | 1 << j] |= 1 << j
    return n <= 1 or ends[-1] != 0


def reaches_all(dense: torch.Tensor, hops: int) -> bool:
    step = (dense | torch.eye(len(dense), dtype=torch.bool)).double()
    return bool((torch.linalg.matrix_power(step, hops) > 0).all())


@pytest.mark.parametrize("pivots", [1, 16])
def test_answers_equal_exhaustive_ones(monkeypatch, pivots):
    """With one pivot nearly every decision on C3 falls to the exact search over all pairs."""
    monkeypatch.setattr(conditions, "_PIVOTS", pivots)
    generator = torch.Generator().manual_seed(pivots)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    answers = Counter()
    for _ in range(400):
        n, num_global, layers = draw(7), draw(3), 1 + draw(5)
        edge_index = torch.randint(max(n, 1), (2, draw(3 * n + 1)), generator=generator)
        g = Graph.from_edge_index(edge_index, n, symmetrize=draw(2) == 0)
        a = AttentionPattern.from_graph(g, draw(2) == 0, num_global, draw(10) == 0)
        c = check_conditions(a, layers)
        dense = a.to_dense()
        assert c.self_loops is bool(dense.diagonal().all())
        assert c.reachable is reaches_all(dense, layers)
        if c.hamiltonian_path is not None:
            assert c.hamiltonian_path is has_hamiltonian_path(dense), dense
        assert c.satisfied is (c.self_loops and c.hamiltonian_path is True and c.reachable)
        assert len(c.reasons) == 3 and all("\n" not in reason for reason in c.reasons)
        answers[c.hamiltonian_path] += 1
    assert answers[True] > 50 and answers[False] > 50 and answers[None] < 40


def test_conditions_of_the_package():
    c = torchgt.check_conditions(pattern(path(4), 4), 3)
    assert c.satisfied and [reason[:3] for reason in c.reasons] == ["C1:", "C2:", "C3:"]


def test_c1_needs_every_self_loop():
    c = check_conditions(pattern([*path(4), (1, 1)], 4, self_loops=False), 4)
    assert c.self_loops is False and not c.satisfied
    assert c.reasons[0] == "C1: 3 of 4 nodes lack a self-loop"


STAR = [(0, i) for i in range(1, 5)]
# Three triangles that share a node: no leaves, yet three pieces without it.
TRIANGLES = [(0, 1), (1, 2), (2, 0), (0, 3), (3, 4), (4, 0), (0, 5), (5, 6), (6, 0)]


@pytest.mark.parametrize(
    ("edges", "n", "num_global", "answer", "reason"),
    [
        ([], 0, 0, True, "at most one token"),
        ([], 1, 0, True, "at most one token"),
        ([], 3, 2, True, "global tokens join all nodes"),
        (path(6), 6, 0, True, "along the order"),
        ([*path(3), (3, 4), (4, 5)], 6, 1, True, "1 gaps being closed by global tokens"),
        ([*path(3), (3, 4), (4, 5)], 6, 0, False, "disconnected: 2 components; a path allows 1"),
        ([(0, 1), (2, 3), (4, 5)], 6, 1, False, "disconnected: 3 components; 1 global tokens allow 2"),
        (STAR, 5, 0, False, "4 leaves and 0 isolated nodes; a path allows 2 ends"),
        (STAR, 5, 1, False, "without node 0 4 components remain; at most 3 may"),
        (STAR, 5, 2, True, "a search found a path"),
        ([*STAR, (0, 5)], 6, 1, False, "5 leaves and 0 isolated nodes; 1 global tokens allow 4 ends"),
        ([(0, 3), (3, 1), (1, 2), (2, 4)], 5, 0, True, "a search found a path"),
        ([(0, 2), (2, 4), (4, 1), (1, 3), (3, 5), (5, 0)], 6, 0, True, "a search found a path"),
        (TRIANGLES, 7, 0, False, "without node 0 3 components remain; at most 2 may"),
        (TRIANGLES, 7, 1, True, "a search found a path"),
        # K(2, 4): no path, but none of the proofs sees it.
        ([(i, j) for i in (0, 1) for j in (2, 3, 4, 5)], 6, 0, None, "neither a path nor a proof"),
    ],
)
def test_c2_certificates(edges, n, num_global, answer, reason):
    c = check_conditions(pattern(edges, n, num_global), 3)
    assert c.hamiltonian_path is answer
    assert reason in c.reasons[1]


def test_c2_follows_the_direction_of_pairs():
    one_way = AttentionPattern.from_graph(Graph.from_edge_index(torch.tensor(path(5)).T, 5))
    assert check_conditions(one_way, 4).hamiltonian_path is True
    apart = Graph.from_edge_index(torch.tensor([[0, 0, 0, 1, 2], [1, 2, 3, 2, 1]]), 4)
    split = Graph.from_edge_index(torch.tensor([[0, 1, 1, 0], [2, 2, 3, 3]]), 4)
    assert check_conditions(AttentionPattern.from_graph(apart), 4).hamiltonian_path is not True
    c = check_conditions(AttentionPattern.from_graph(split), 4)
    assert c.hamiltonian_path is False and "2 nodes attend to no other; a path allows 1 such" in c.reasons[1]


def test_c2_of_a_pattern_built_with_a_path():
    a = pattern([], 50, hamiltonian_path=True)
    assert check_conditions(a, 2).hamiltonian_path is True
    shuffled = a.permute(torch.randperm(50, generator=torch.Generator().manual_seed(0)))
    assert check_conditions(shuffled, 2).hamiltonian_path is True


def test_cut_vertices_in_a_long_chain():
    """Deep graphs need no recursion: a chain of 20,000 nodes that splits in three at its far end, leaves closed off
    by triangles so that only the node where it splits is telling."""
    n = 20_000
    tails = [(n - 1, n), (n, n + 1), (n + 1, n - 1), (n - 1, n + 2), (n + 2, n + 3), (n + 3, n - 1)]
    order = torch.randperm(n + 4, generator=torch.Generator().manual_seed(0))
    a = pattern([*path(n), *tails], n + 4).permute(order)
    centre = int((order == n - 1).nonzero())
    c = check_conditions(a, 4)
    assert c.hamiltonian_path is False
    assert c.reasons[1] == f"C2: without node {centre} 3 components remain; at most 2 may"


@pytest.mark.parametrize(
    ("edges", "n", "num_global", "layers", "answer"),
    [
        ([], 0, 0, 1, True),
        ([], 1, 0, 1, True),
        ([], 1, 1, 1, True),
        ([], 2, 0, 9, False),
        ([], 2, 1, 1, False),
        ([], 2, 1, 2, True),
        (path(6), 6, 0, 4, False),
        (path(6), 6, 0, 5, True),
        ([(0, 1), (1, 2), (2, 0)], 3, 0, 1, True),
        (STAR, 5, 0, 1, False),
        (STAR, 5, 0, 2, True),
    ],
)
def test_c3(edges, n, num_global, layers, answer):
    assert check_conditions(pattern(edges, n, num_global), layers).reachable is answer


def test_c3_follows_the_direction_of_pairs():
    ring = AttentionPattern.from_graph(Graph.from_edge_index(torch.tensor([*path(6), (5, 0)]).T, 6))
    assert check_conditions(ring, 4).reachable is False
    assert check_conditions(ring, 5).reachable is True


@pytest.mark.parametrize("batch_bytes", [1, 256 << 20])
def test_c3_over_several_batches_of_targets(monkeypatch, batch_bytes):
    """A torus: every node is equally far from its antipode, so no bound helps and every pair must be tried."""
    monkeypatch.setattr(conditions, "_PIVOTS", 1)
    monkeypatch.setattr(conditions, "_BATCH_BYTES", batch_bytes)
    side = 13
    node = torch.arange(side * side).reshape(side, side)
    edge_index = torch.stack([node.repeat(2, 1).flatten(), torch.cat([node.roll(1, 0), node.roll(1, 1)]).flatten()])
    torus = AttentionPattern.from_graph(Graph.from_edge_index(edge_index, side * side, symmetrize=True))
    diameter = 2 * (side // 2)
    assert check_conditions(torus, diameter).reachable is True
    assert check_conditions(torus, diameter - 1).reachable is False
    chain = pattern([*path(100), *((i, i + 2) for i in range(98))], 100)
    assert check_conditions(chain, 50).reachable is True
    assert check_conditions(chain, 49).reachable is False


def test_c3_is_unknown_when_time_is_up(monkeypatch):
    monkeypatch.setattr(conditions, "_PIVOTS", 1)
    side = 13
    ring = pattern([(i, (i + 1) % side) for i in range(side)], side)
    c = check_conditions(ring, 6, time_limit=1e-9)
    assert c.reachable is None and not c.satisfied
    assert c.reasons[2] == "C3: not decided within the time limit"
    assert check_conditions(ring, 6).reachable is True


def test_full_patterns():
    for cuts, answer in (([0, 4], True), ([0, 0, 4, 4], True), ([0, 2, 4], False), ([0, 1], True), ([0], True)):
        c = check_conditions(AttentionPattern.full(torch.tensor(cuts)), 1)
        assert (c.self_loops, c.hamiltonian_path, c.reachable) == (True, answer, answer)
    big = AttentionPattern.full(torch.tensor([0, 16384]))
    assert check_conditions(big, 1).satisfied and big._col is None


def test_augmenting_satisfies_all_conditions():
    """Self-loops, a path and one global token are enough for any graph and two layers."""
    g = Graph.from_edge_index(torch.tensor([[0, 0, 7], [5, 6, 8]]), 30)
    assert not check_conditions(AttentionPattern.from_graph(g), 2).satisfied
    assert check_conditions(AttentionPattern.from_graph(g, True, 1, True), 2).satisfied


@pytest.mark.parametrize(("layers", "limit", "message"), [(0, 1, "num_layers is 0"), (2, 0, "time_limit is 0")])
def test_invalid_arguments_are_refused(layers, limit, message):
    with pytest.raises(ValueError, match=message):
        check_conditions(pattern([], 2), layers, time_limit=limit)
