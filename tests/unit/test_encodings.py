"""Encodings against plain definitions, and the corners where such code goes wrong."""

from collections import deque

import pytest
import torch

from torchgt import Graph
from torchgt.models.encodings import (
    degree_encoding,
    laplacian_encoding,
    num_distance_types,
    padding_type,
    shortest_path_types,
)


def graph(edges, num_nodes, symmetrize=True):
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T
    return Graph.from_edge_index(edge_index, num_nodes, symmetrize=symmetrize)


def random_graph(num_nodes, num_edges, seed, symmetrize):
    generator = torch.Generator().manual_seed(seed)
    return Graph.from_edge_index(
        torch.randint(num_nodes, (2, num_edges), generator=generator), num_nodes, symmetrize=symmetrize
    )


def breadth_first(g, max_distance):
    """The definition, one source and one node at a time."""
    types = torch.full((g.num_nodes, g.num_nodes), max_distance + 2, dtype=torch.uint8)
    for source in range(g.num_nodes):
        steps, queue = {source: 0}, deque([source])
        while queue:
            node = queue.popleft()
            for neighbour in g.col[g.rowptr[node] : g.rowptr[node + 1]].tolist():
                if neighbour not in steps:
                    steps[neighbour] = steps[node] + 1
                    queue.append(neighbour)
        for node, distance in steps.items():
            types[source, node] = min(distance, max_distance + 1)
    return types


@pytest.mark.parametrize("symmetrize", [True, False])
@pytest.mark.parametrize("num_nodes, num_edges", [(1, 3), (2, 0), (7, 4), (30, 25), (61, 70), (64, 200)])
@pytest.mark.parametrize("max_distance", [0, 1, 3, 100])
def test_distances_equal_a_search_from_every_node(num_nodes, num_edges, symmetrize, max_distance):
    g = random_graph(num_nodes, num_edges, seed=num_edges, symmetrize=symmetrize)
    assert torch.equal(shortest_path_types(g, max_distance), breadth_first(g, max_distance))


def test_paths_may_lead_through_node_0():
    types = shortest_path_types(graph([(1, 0), (0, 2)], 3), max_distance=5)
    assert types[1, 2] == 2 and types[2, 1] == 2


def test_farther_unreachable_and_padding_are_three_ids():
    path_and_island = graph([(0, 1), (1, 2), (2, 3)], 5)
    types = shortest_path_types(path_and_island, max_distance=2)
    farther, unreachable, padding = types[0, 3].item(), types[0, 4].item(), padding_type(2)
    assert (farther, unreachable, padding) == (3, 4, 5)
    assert num_distance_types(2) == 6
    assert padding not in types


def test_direction_is_kept():
    one_way = graph([(1, 0)], 2, symmetrize=False)  # source 1, target 0: token 0 attends to 1
    assert shortest_path_types(one_way, 3).tolist() == [[0, 1], [5, 0]]


def test_blocks_of_rows_change_nothing(monkeypatch):
    g = random_graph(300, 4000, seed=1, symmetrize=False)
    whole = shortest_path_types(g, 3)
    monkeypatch.setattr("torchgt.models.encodings._BLOCK_BYTES", 1000)
    assert torch.equal(shortest_path_types(g, 3), whole)


def test_no_nodes():
    assert shortest_path_types(graph([], 0), 3).shape == (0, 0)
    assert laplacian_encoding(graph([], 0), 4).shape == (0, 4)
    assert degree_encoding(graph([], 0)).shape == (0,)


@pytest.mark.parametrize("value", [-1, 253, 2.0, True])
def test_distances_that_no_byte_holds_are_refused(value):
    with pytest.raises(ValueError, match="max_distance"):
        shortest_path_types(graph([], 2), value)


def normalised_laplacian(g):
    dense = torch.zeros(g.num_nodes, g.num_nodes, dtype=torch.float64)
    rows = torch.arange(g.num_nodes).repeat_interleave(g.degrees())
    dense[rows, g.col.long()] = 1
    dense = torch.maximum(dense, dense.T).fill_diagonal_(0)
    scale = dense.sum(1).clamp(min=1).rsqrt()
    return torch.eye(g.num_nodes, dtype=torch.float64) - scale[:, None] * dense * scale


@pytest.mark.parametrize("k", [0, 1, 5, 19, 20, 25])
def test_laplacian_vectors_are_eigenvectors_padded_with_zeros(k):
    g = random_graph(20, 60, seed=0, symmetrize=False)
    encoding = laplacian_encoding(g, k).double()
    assert encoding.shape == (20, k)
    laplacian, count = normalised_laplacian(g), min(k, 19)
    values = torch.linalg.eigvalsh(laplacian)[1 : 1 + count]
    torch.testing.assert_close(laplacian @ encoding[:, :count], encoding[:, :count] * values, atol=1e-6, rtol=0)
    torch.testing.assert_close(encoding[:, :count].norm(dim=0), torch.ones(count).double())
    assert not encoding[:, count:].any()
    assert all(column[column.abs().argmax()] > 0 for column in encoding[:, :count].T)


def test_laplacian_of_one_node_and_of_isolated_nodes():
    assert laplacian_encoding(graph([(0, 0)], 1), 3).tolist() == [[0.0, 0.0, 0.0]]
    assert laplacian_encoding(graph([], 4), 2).isfinite().all()


def test_lanczos_equals_the_dense_decomposition(monkeypatch):
    g = random_graph(120, 500, seed=3, symmetrize=True)
    dense = laplacian_encoding(g, 4)
    monkeypatch.setattr("torchgt.models.encodings._EIGH_NODES", 10)
    torch.testing.assert_close(laplacian_encoding(g, 4), dense, atol=1e-5, rtol=0)


def test_degrees_are_clipped():
    star = graph([(0, leaf) for leaf in range(1, 6)], 7)
    assert degree_encoding(star).tolist() == [5, 1, 1, 1, 1, 1, 0]
    assert degree_encoding(star, max_degree=3).tolist() == [3, 1, 1, 1, 1, 1, 0]
    with pytest.raises(ValueError, match="max_degree"):
        degree_encoding(star, max_degree=-1)
