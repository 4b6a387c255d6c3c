"""Sequences: every node once an epoch, none empty, none too long, and the same whenever they are drawn again."""

from __future__ import annotations

import pytest
import torch

from torchgt import Graph, partition_graph
from torchgt.data.sequences import SequenceSampler

N = 60


@pytest.fixture(scope="module")
def partition():
    """A ring of 60 nodes, ids scattered, in 12 parts."""
    nodes = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    return partition_graph(Graph.from_edge_index(torch.stack((nodes, nodes.roll(1))), N, symmetrize=True), 12)


def covers(sequences, tokens, n=N):
    assert torch.equal(torch.cat(sequences).sort().values, torch.arange(n))
    assert all(0 < len(nodes) <= tokens and nodes.dtype == torch.int64 for nodes in sequences)
    return True


def of_whole_parts(nodes, partition):
    parts = partition.assignment[nodes].unique()
    return len(nodes) == int(partition.offsets.diff()[parts].sum())


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("n", "tokens", "lengths"), [(60, 20, [20] * 3), (61, 20, [20, 20, 20, 1]), (1, 20, [1])])
def test_random_sequences(n, tokens, lengths):
    sampler = SequenceSampler("random", n, tokens, seed=1)
    assert [len(nodes) for nodes in sampler.epoch(0)] == lengths
    assert covers(sampler.epoch(0), tokens, n)


def test_full_sequence_follows_the_clusters_if_there_are_any(partition):
    assert torch.equal(SequenceSampler("full", N).epoch(3)[0], torch.arange(N))
    assert equal(SequenceSampler("full", N, partition=partition).epoch(3), [partition.order.long()])


@pytest.mark.parametrize("tokens", [7, 10, 25, 59, 60, 1000])
def test_cluster_sequences_are_unions_of_whole_parts(partition, tokens):
    assert int(partition.offsets.diff().max()) <= 7  # else the cutting of large parts would be tested here
    sampler = SequenceSampler("clusters", N, tokens, partition=partition)
    for epoch in range(3):
        sequences = sampler.epoch(epoch)
        assert covers(sequences, tokens)
        assert all(of_whole_parts(nodes, partition) for nodes in sequences)
        # No two sequences would fit into one, up to the largest part: steps are not wasted on slivers.
        assert len(sequences) <= -(-N // max(1, tokens - 6))
        for nodes in sequences:  # tokens stay in the clusters' order
            assert bool((partition.inverse[nodes].diff() > 0).all())


def test_parts_larger_than_a_sequence_are_cut(partition):
    assert covers(SequenceSampler("clusters", N, 2, partition=partition).epoch(0), 2)
    assert covers(SequenceSampler("clusters", N, 2, partition=partition).disjoint(), 2)
    assert len(SequenceSampler("clusters", N, 2, partition=partition).union(0, 2)) == 2


@pytest.mark.parametrize("kind", ["clusters", "random"])
def test_draws_depend_on_seed_and_epoch_alone(partition, kind):
    def sampler(seed=5):
        return SequenceSampler(kind, N, 20, partition=partition, seed=seed)

    first = sampler()
    epochs = [first.epoch(e) for e in range(3)]
    assert equal(sampler().epoch(2), epochs[2])  # without having drawn the two before it
    assert not equal(epochs[0], epochs[1])
    assert not equal(sampler(6).epoch(0), epochs[0])
    assert torch.equal(sampler().union(9, 20), first.union(9, 20))
    assert not torch.equal(first.union(8, 20), first.union(9, 20))


def test_union_is_filled_with_whole_parts(partition):
    sampler = SequenceSampler("full", N, partition=partition)
    seen = torch.zeros(N, dtype=torch.bool)
    for step in range(40):
        nodes = sampler.union(step, 23)
        assert 23 - 4 <= len(nodes) <= 23 and len(nodes.unique()) == len(nodes)
        assert of_whole_parts(nodes, partition)
        seen[nodes] = True
    assert seen.all()
    assert torch.equal(sampler.union(0, N), sampler.whole())
    assert torch.equal(sampler.union(0, 10 * N), sampler.whole())


def test_union_without_clusters_is_a_random_set():
    nodes = SequenceSampler("random", N, 20).union(3, 23)
    assert len(nodes.unique()) == 23


@pytest.mark.parametrize("kind", ["full", "clusters", "random"])
def test_disjoint_sequences_are_fixed(partition, kind):
    sampler = SequenceSampler(kind, N, 20, partition=partition if kind != "random" else None)
    assert covers(sampler.disjoint(), 20)
    sampler.epoch(4)
    assert equal(sampler.disjoint(), sampler.disjoint())
    if kind != "random":
        assert all(of_whole_parts(nodes, partition) for nodes in sampler.disjoint())


def test_disjoint_without_a_limit_is_the_whole(partition):
    assert equal(SequenceSampler("full", N, partition=partition).disjoint(), [partition.order.long()])


def test_no_nodes():
    sampler = SequenceSampler("random", 0, 5)
    assert sampler.epoch(0) == sampler.disjoint() == []


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("cluster", N, 5), ["'cluster'", "did you mean 'clusters'", "full, random"]),
        (("random", N, 0), ["tokens is 0", "at least 1"]),
        (("clusters", N, 5), ["partition is None"]),
        (("full", -1), ["num_nodes is -1"]),
    ],
)
def test_arguments_that_do_not_fit(arguments, texts):
    with pytest.raises(ValueError) as error:
        SequenceSampler(*arguments)
    assert all(text in str(error.value) for text in texts), error.value


def test_partition_of_another_graph(partition):
    with pytest.raises(ValueError, match="60 nodes; num_nodes is 61"):
        SequenceSampler("clusters", N + 1, 5, partition=partition)
    with pytest.raises(ValueError, match="tokens is 0"):
        SequenceSampler("full", N).union(0, 0)
