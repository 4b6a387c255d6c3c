"""Partitions: whole, reproducible, cut counted by us, and a partitioner that may crash."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import torchgt
from torchgt import partition
from torchgt.graph import Graph
from torchgt.partition import PartitionError, partition_graph, partition_key


def blocks(num_blocks: int = 4, size: int = 40, bridges: int = 10, seed: int = 0, both_ways: bool = True) -> Graph:
    """Dense blocks with a few bridges, node ids shuffled."""
    rng = np.random.default_rng(seed)
    n = num_blocks * size
    edges = [
        np.stack([rng.integers(0, size, 6 * size), rng.integers(0, size, 6 * size)]) + b * size
        for b in range(num_blocks)
    ]
    edges.append(rng.integers(0, n, (2, bridges)))
    return Graph.from_edge_index(
        torch.from_numpy(rng.permutation(n)[np.concatenate(edges, 1)]), n, symmetrize=both_ways
    )


def star(n: int) -> Graph:
    return Graph.from_edge_index(torch.stack([torch.arange(1, n), torch.zeros(n - 1, dtype=torch.int64)]), n)


def check(g: Graph, p: torchgt.Partition) -> None:
    n = g.num_nodes
    assert torch.equal(p.order[p.inverse], torch.arange(n)) and torch.equal(p.inverse[p.order], torch.arange(n))
    assert p.offsets.numel() == p.num_parts + 1
    assert int(p.offsets[0]) == 0 and int(p.offsets[-1]) == n
    assert bool((p.offsets.diff() > 0).all()), "an empty part"
    new = torch.repeat_interleave(torch.arange(p.num_parts), p.offsets.diff())
    assert torch.equal(p.assignment[p.order], new)
    undirected = {(min(s, t), max(s, t)) for s, t in g.edge_index().T.tolist()}
    assert p.edge_cut == sum(int(p.assignment[s]) != int(p.assignment[t]) for s, t in undirected)


def test_blocks_are_found():
    g = blocks()
    p = partition_graph(g, 4)
    check(g, p)
    assert p.num_parts == 4
    assert p.edge_cut <= 10
    assert p.offsets.diff().tolist() == [40] * 4


def test_neighbours_lie_close_within_a_part():
    """Two shuffled chains: along the order of each part, consecutive nodes are neighbours again."""
    n = 200
    order = torch.randperm(2 * n, generator=torch.Generator().manual_seed(0))
    chains = torch.stack([torch.arange(2 * n - 1), torch.arange(1, 2 * n)])[:, torch.arange(2 * n - 1) != n - 1]
    g = Graph.from_edge_index(order[chains], 2 * n)
    p = partition_graph(g, 2)
    check(g, p)
    assert p.edge_cut == 0
    links = p.inverse[g.edge_index()]
    assert int((links[0] - links[1]).abs().max()) == 1


def test_direction_and_loops_change_nothing():
    directed = blocks(both_ways=False)
    plain = directed.symmetrized(keep_loops=False)
    a, b = partition_graph(directed, 4), partition_graph(plain, 4)
    check(directed, a)
    assert torch.equal(a.assignment, b.assignment) and a.edge_cut == b.edge_cut


def test_the_seed_fixes_the_partition():
    g = blocks(bridges=400)
    first = partition_graph(g, 8, seed=1)
    assert torch.equal(first.assignment, partition_graph(g, 8, seed=1).assignment)
    assert any(not torch.equal(first.assignment, partition_graph(g, 8, seed=s).assignment) for s in (2, 3, 4))


@pytest.mark.parametrize(
    ("g", "num_parts"),
    [
        (Graph.from_edge_index(torch.zeros(2, 0), 0), 3),
        (Graph.from_edge_index(torch.zeros(2, 0), 1), 3),
        (Graph.from_edge_index(torch.zeros(2, 0), 10), 3),
        (Graph.from_edge_index(torch.tensor([[0, 1], [0, 1]]), 4), 2),
        (Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4), 1),
        (Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4), 4),
        (Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4), 9),
        (Graph.from_edge_index(torch.tensor([[0, 2, 4], [1, 3, 5]]), 12), 5),
        (star(101), 2),
        (star(101), 8),
        (star(101), 90),
        (blocks(bridges=0), 3),
    ],
)
def test_odd_graphs_and_numbers_of_parts(g, num_parts):
    p = partition_graph(g, num_parts)
    check(g, p)
    assert p.num_parts <= min(num_parts, g.num_nodes)
    assert p.num_parts >= min(num_parts, g.num_nodes) * 0.75


def test_parts_left_empty_are_removed_and_logged(caplog, monkeypatch):
    monkeypatch.setattr(partition, "_run_metis", lambda both, parts, seed: np.array([5, 2, 2, 5]))
    g = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4)
    with caplog.at_level(logging.WARNING):
        p = partition_graph(g, 3)
    check(g, p)
    assert p.num_parts == 2 and p.assignment.tolist() == [1, 0, 0, 1]
    assert "3 parts were asked for, 2 made of 4 nodes" in caplog.text


def test_a_crash_of_the_partitioner_is_an_error(tmp_path, monkeypatch):
    """METIS has ended whole processes with a segmentation fault; ours must survive it and say so."""
    crash = tmp_path / "crash.py"
    crash.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setattr(partition, "_WORKER", crash)
    with pytest.raises(PartitionError, match="METIS was ended by SIGSEGV"):
        partition_graph(blocks(), 4)


def test_what_a_failing_partitioner_says_is_kept(tmp_path, monkeypatch):
    fails = tmp_path / "fails.py"
    fails.write_text("import no_such_partitioner\n")
    monkeypatch.setattr(partition, "_WORKER", fails)
    with pytest.raises(PartitionError, match="exit status 1: ModuleNotFoundError: .*no_such_partitioner"):
        partition_graph(blocks(), 4, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_kept_partition_is_read_again(tmp_path, monkeypatch):
    g = blocks()
    first = partition_graph(g, 4, cache_dir=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [f"{partition_key(g, 4, 0)}.npy"]
    monkeypatch.setattr(partition, "_run_metis", lambda *_: pytest.fail("partitioned again"))
    again = partition_graph(g, 4, cache_dir=tmp_path)
    assert torch.equal(first.assignment, again.assignment)
    keys = {partition_key(g, 4, 0), partition_key(g, 4, 1), partition_key(g, 5, 0), partition_key(g.transpose(), 4, 0)}
    assert len(keys) == 3, "a symmetric graph is its own transpose; all else must tell"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_parts": 0}, "num_parts is 0; expected an integer >= 1"),
        ({"num_parts": 2.0}, "num_parts is 2.0"),
        ({"num_parts": 2, "seed": -1}, "seed is -1"),
        ({"num_parts": 2, "seed": 2**31}, "METIS takes 0..2147483647"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        partition_graph(blocks(), **arguments)


def test_only_graphs_are_partitioned():
    with pytest.raises(ValueError, match="g is a Tensor; expected a torchgt.Graph"):
        partition_graph(torch.zeros(2, 3), 2)
