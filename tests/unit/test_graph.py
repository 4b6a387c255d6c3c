"""Graphs against sets of edges, their errors, and that importing the package is cheap."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import torchgt
from torchgt.graph import Graph, check_columns, connected_subset, insert_pairs, locate_pairs


def edges_of(g: Graph) -> set[tuple[int, int]]:
    """(source, target), after checking that the rows are sound."""
    check_columns(g.rowptr, g.col, 0, g.num_nodes)
    return set(map(tuple, g.edge_index().T.tolist()))


def random_edges(seed: int) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    n = seed % 9
    e = int(torch.randint(3 * n + 1, (1,), generator=generator))
    return torch.randint(max(n, 1), (2, e), generator=generator), n


def test_a_row_lists_the_sources_of_a_target():
    g = torchgt.Graph.from_edge_index(torch.tensor([[3, 1, 0], [0, 0, 2]]), 4)
    assert g.rowptr.tolist() == [0, 2, 2, 3, 3]
    assert g.col.tolist() == [1, 3, 0]
    assert g.rowptr.dtype == torch.int64
    assert (g.num_nodes, g.num_edges, g.num_duplicates_removed) == (4, 3, 0)
    assert g.degrees().tolist() == [2, 0, 1, 0]


@pytest.mark.parametrize("seed", range(30))
def test_operations_equal_those_on_edge_sets(seed):
    edge_index, n = random_edges(seed)
    edges = list(map(tuple, edge_index.T.tolist()))
    g = Graph.from_edge_index(edge_index, n)
    reverse = {(t, s) for s, t in edges}
    assert edges_of(g) == set(edges)
    assert g.num_duplicates_removed == len(edges) - len(set(edges))
    assert edges_of(g.transpose()) == reverse
    assert edges_of(g.symmetrized()) == set(edges) | reverse
    assert edges_of(g.symmetrized(keep_loops=False)) == {(s, t) for s, t in set(edges) | reverse if s != t}
    assert edges_of(g.without_loops()) == {(s, t) for s, t in edges if s != t}

    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    new = {int(old): k for k, old in enumerate(order)}
    assert edges_of(g.permute(order)) == {(new[s], new[t]) for s, t in edges}
    nodes = order[: n // 2]
    chosen = {int(old): k for k, old in enumerate(nodes)}
    assert edges_of(g.subgraph(nodes)) == {(chosen[s], chosen[t]) for s, t in edges if s in chosen and t in chosen}


def test_symmetrising_counts_only_edges_given_twice():
    g = Graph.from_edge_index(torch.tensor([[0, 1, 0, 2], [1, 0, 1, 2]]), 3, symmetrize=True)
    assert edges_of(g) == {(0, 1), (1, 0), (2, 2)}
    assert g.num_duplicates_removed == 1


@pytest.mark.parametrize("n", [0, 1, 5])
def test_graphs_without_edges(n):
    for empty in (torch.zeros(2, 0, dtype=torch.int64), torch.empty(2, 0)):
        g = Graph.from_edge_index(empty, n, symmetrize=True)
        assert (g.num_nodes, g.num_edges) == (n, 0)
        assert g.permute(torch.arange(n)).num_nodes == g.transpose().num_nodes == n
        assert g.subgraph(torch.arange(n)).num_nodes == n
        assert len(g.digest()) == 64


def test_input_is_not_changed_and_integer_types_are_taken():
    edge_index = torch.tensor([[2, 0, 1], [1, 1, 0]])
    before = edge_index.clone()
    expected = edges_of(Graph.from_edge_index(edge_index, 3))
    assert torch.equal(edge_index, before)
    assert edges_of(Graph.from_edge_index(edge_index.to(torch.int32), 3)) == expected
    assert edges_of(Graph.from_edge_index(edge_index.numpy(), 3)) == expected


def test_digest_names_the_content():
    g = Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3)
    assert g.digest() == Graph(g.rowptr, g.col.long()).digest()
    assert g.digest() == Graph.from_edge_index(torch.tensor([[1, 0], [2, 1]]), 3).digest()
    others = (
        Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 4),
        Graph.from_edge_index(torch.tensor([[0, 0], [1, 2]]), 3),
    )
    assert all(g.digest() != other.digest() for other in others)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Graph.from_edge_index(torch.zeros(3, 2, dtype=torch.int64), 4), r"edge_index has shape \(3, 2\)"),
        (lambda: Graph.from_edge_index(torch.zeros(2, 2), 4), "edge_index has dtype torch.float32; expected integers"),
        (lambda: Graph.from_edge_index(torch.tensor([[0], [4]]), 4), "edge_index contains 4; allowed: 0..3"),
        (lambda: Graph.from_edge_index(torch.tensor([[-1], [0]]), 4), "edge_index contains -1"),
        (lambda: Graph.from_edge_index(torch.tensor([[0], [0]]), 0), "edge_index contains 0; allowed: none"),
        (lambda: Graph.from_edge_index(torch.zeros(2, 0), -1), "num_nodes is -1"),
        (lambda: Graph.from_edge_index(torch.zeros(2, 0), 2.5), "num_nodes is 2.5"),
        (lambda: Graph.from_edge_index(torch.zeros(2, 0), 2**40), "at most 3037000499 nodes"),
        (lambda: Graph(torch.tensor([1, 2]), torch.tensor([0])), "rowptr starts with"),
        (lambda: Graph(torch.tensor([0, 2, 1]), torch.tensor([0])), "rowptr falls from 2 to 1 at row 1"),
        (
            lambda: Graph(torch.tensor([0, 1]), torch.tensor([0, 0])),
            "rowptr ends with 1; expected the length of col, 2",
        ),
        (lambda: Graph(torch.tensor([0, 1]), torch.tensor([1])), "col contains 1; allowed: 0..0"),
        (lambda: Graph(torch.tensor([0, 0, 2]), torch.tensor([1, 0])), "col: row 1 is not sorted at column 0"),
        (lambda: Graph(torch.tensor([0, 2, 2]), torch.tensor([1, 1])), "col: row 0 repeats column 1"),
    ],
)
def test_invalid_graphs_are_refused(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_rows_are_checked_one_by_one():
    """A column may fall from one row to the next, whatever empty rows lie between."""
    assert Graph(torch.tensor([0, 0, 2, 2, 3, 3]), torch.tensor([1, 4, 0])).num_edges == 3


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([0, 1, 0], "nodes repeats node 0"),
        ([3], "nodes contains 3"),
        ([-1], "nodes contains -1"),
        ([0.5], "nodes has dtype torch.float32"),
    ],
)
def test_invalid_node_lists_are_refused(nodes, message):
    g = Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3)
    with pytest.raises(ValueError, match=message):
        g.subgraph(torch.tensor(nodes))


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3]])
def test_only_permutations_permute(order):
    g = Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3)
    with pytest.raises(ValueError, match="order"):
        g.permute(torch.tensor(order))


def test_located_pairs_and_insertions_keep_rows_sorted():
    rng = np.random.default_rng(0)
    dense = torch.from_numpy(rng.random((40, 40)) < 0.2)
    g = Graph.from_edge_index(dense.nonzero().T.flip(0), 40)
    rows, cols = torch.arange(40).repeat_interleave(40), torch.arange(40).repeat(40)
    position, found = locate_pairs(g.rowptr, g.col, rows, cols)
    assert torch.equal(found, dense.flatten())
    assert torch.equal(g.col[position[found]].long(), cols[found])
    missing = ~found & torch.from_numpy(rng.random(1600) < 0.5)
    rowptr, col, old = insert_pairs(g.rowptr, g.col, rows[missing], cols[missing])
    check_columns(rowptr, col, 0, 40)
    assert torch.equal(col[old], g.col)
    both = (dense.flatten() | missing).reshape(40, 40)
    assert torch.equal(rowptr.diff(), both.sum(1))
    assert torch.equal(col.long(), both.nonzero()[:, 1])


def test_connected_subset_hangs_together():
    """Two components and isolated nodes: the nodes come from the larger one, and form one component."""
    generator = torch.Generator().manual_seed(0)
    ring = torch.stack([torch.arange(200), (torch.arange(200) + 1) % 200])
    chords = torch.randint(200, (2, 60), generator=generator)
    small = torch.tensor([[200, 201], [201, 202]])
    g = Graph.from_edge_index(torch.cat([ring, chords, small], 1), 210)
    for n in (1, 50, 200):
        nodes = connected_subset(g, n, seed=3)
        assert nodes.dtype == torch.int64 and nodes.numel() == n
        assert nodes.tolist() == sorted(set(nodes.tolist())) and int(nodes[-1]) < 200
        reached = torch.zeros(n, dtype=torch.bool)
        reached[0] = True
        links = g.subgraph(nodes).symmetrized().edge_index()
        for _ in range(n):
            reached[links[1][reached[links[0]]]] = True
        assert bool(reached.all())
    assert torch.equal(connected_subset(g, 50, 3), connected_subset(g, 50, 3))
    assert not torch.equal(connected_subset(g, 50, 3), connected_subset(g, 50, 4))
    assert connected_subset(g, 0, 0).numel() == 0
    with pytest.raises(ValueError, match="n is 201; the largest connected component has 200 of 210 nodes"):
        connected_subset(g, 201, 0)


def test_import_loads_nothing_heavy():
    code = """
import sys, torchgt

def loaded(*names):
    return set(names) & set(sys.modules)

assert "partition_graph" in dir(torchgt) and torchgt.__version__ == "0.1.0"
harness = "torch_geometric", "pandas", "sklearn", "ogb", "snakemake"
assert not loaded("torch", "numpy", "scipy", *harness), sys.modules.keys()
for name in torchgt.__all__:
    getattr(torchgt, name)
assert loaded("torch") and not loaded("pymetis", *harness), loaded("pymetis", *harness)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_resolves():
    for name in torchgt.__all__:
        assert getattr(torchgt, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'grpah'"):
        torchgt.grpah  # noqa: B018
