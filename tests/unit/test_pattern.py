"""Attention patterns against dictionaries {(i, j): type} written from their definition."""

from __future__ import annotations

import pytest
import torch

from torchgt.graph import Graph, check_columns, row_ids
from torchgt.pattern import ADDED, EDGE, PATH, SELF, AttentionPattern


def pairs_of(a: AttentionPattern) -> dict[tuple[int, int], int]:
    """{(i, j): type} over nodes, in the order of the pairs, after checking that the rows are sound."""
    check_columns(a.rowptr, a.col, a.num_global, a.num_tokens)
    assert a.pair_type.dtype == torch.uint8
    rows = (a.row_ids() - a.num_global).tolist()
    return dict(zip(zip(rows, (a.col - a.num_global).tolist(), strict=True), a.pair_type.tolist(), strict=True))


def expected_pairs(n, edges, self_loops, path) -> dict[tuple[int, int], int]:
    pairs = {}
    if path:
        pairs |= {(i, i + 1): PATH for i in range(n - 1)} | {(i + 1, i): PATH for i in range(n - 1)}
    pairs |= {(target, source): EDGE for source, target in edges}
    return pairs | {(i, i): SELF for i in range(n) if self_loops or (i, i) in pairs}


def case(seed: int):
    generator = torch.Generator().manual_seed(seed)
    n = seed % 8
    e = int(torch.randint(2 * n + 1, (1,), generator=generator))
    edge_index = torch.randint(max(n, 1), (2, e), generator=generator)
    order = torch.randperm(n, generator=generator)
    return Graph.from_edge_index(edge_index, n), list(map(tuple, edge_index.T.tolist())), order


@pytest.mark.parametrize("num_global", [0, 1, 2])
@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize("self_loops", [False, True])
def test_patterns_of_graphs(self_loops, path, num_global):
    for seed in range(24):
        g, edges, order = case(seed)
        n = g.num_nodes
        a = AttentionPattern.from_graph(g, self_loops, num_global, path)
        expected = expected_pairs(n, edges, self_loops, path)
        assert pairs_of(a) == expected
        assert (a.num_tokens, a.num_nodes, a.num_global, a.num_types) == (n + num_global, n, num_global, 6)
        assert a.num_pairs == len(expected) and a.pair_index is None
        assert a.rowptr[: num_global + 1].tolist() == [0] * (num_global + 1)
        assert a.density == (len(expected) / n**2 if n else 0)

        dense = torch.zeros(n + num_global, n + num_global, dtype=torch.bool)
        dense[:num_global] = dense[:, :num_global] = True
        for i, j in expected:
            dense[i + num_global, j + num_global] = True
        assert torch.equal(a.to_dense(), dense)
        assert a.num_pairs_computed == int(dense.sum())

        b = a.permute(order)
        new = {int(old): k for k, old in enumerate(order)}
        assert pairs_of(b) == expected_pairs(n, [(new[s], new[t]) for s, t in edges], self_loops, path)
        positions = {pair: k for k, pair in enumerate(expected_order(a))}
        for (i, j), index in zip(pairs_of(b), b.pair_index.tolist(), strict=True):
            assert positions.get((int(order[i]), int(order[j])), -1) == index
        assert b.has_path == path and b.num_global == num_global


def expected_order(a: AttentionPattern) -> list[tuple[int, int]]:
    return list(pairs_of(a))


def test_input_loops_survive_without_self_loops_and_are_not_doubled_with_them():
    g = Graph.from_edge_index(torch.tensor([[0, 0, 1], [0, 0, 0]]), 3)
    assert pairs_of(AttentionPattern.from_graph(g, self_loops=False)) == {(0, 0): SELF, (0, 1): EDGE}
    a = AttentionPattern.from_graph(g)
    assert pairs_of(a) == {(0, 0): SELF, (0, 1): EDGE, (1, 1): SELF, (2, 2): SELF}


def test_the_identity_permutation_keeps_every_pair():
    g, *_ = case(7)
    a = AttentionPattern.from_graph(g, num_global=1, hamiltonian_path=True)
    b = a.permute(torch.arange(7))
    assert torch.equal(b.pair_index, torch.arange(a.num_pairs))
    assert torch.equal(a.col, b.col) and torch.equal(a.pair_type, b.pair_type)


def test_type_2_of_a_caller_is_no_path():
    """Only a path that the pattern laid itself is laid anew."""
    a = AttentionPattern.from_pairs(torch.tensor([0, 1, 1, 1]), torch.tensor([1]), torch.tensor([PATH]))
    b = a.permute(torch.tensor([0, 2, 1]))
    assert pairs_of(b) == {(0, 2): PATH} and b.pair_index.tolist() == [0]


@pytest.mark.parametrize("num_global", [0, 1, 3])
def test_globals_as_pairs(num_global):
    for seed in range(16):
        g, *_ = case(seed)
        a = AttentionPattern.from_graph(g, num_global=num_global, hamiltonian_path=seed % 2 == 0)
        rowptr, col, kind, index = a.with_globals_as_pairs()
        explicit = AttentionPattern.from_pairs(rowptr, col)
        assert torch.equal(explicit.to_dense(), a.to_dense())
        stored = index >= 0
        assert torch.equal(index[stored], torch.arange(a.num_pairs))
        assert torch.equal(kind[stored], a.pair_type) and torch.equal(col[stored], a.col)
        rows = row_ids(rowptr)
        assert torch.equal(kind == a.num_types - 2, rows < num_global)
        assert torch.equal(kind == a.num_types - 1, (rows >= num_global) & (col < num_global))


def test_transposed():
    for seed in range(16):
        g, *_ = case(seed)
        a = AttentionPattern.from_graph(g, num_global=seed % 3)
        rowptr, col, index = a.transposed()
        check_columns(rowptr, col, a.num_global, a.num_tokens)
        assert torch.equal(row_ids(rowptr), a.col[index].long())
        assert torch.equal(col, a.row_ids()[index])
        assert a.transposed()[0] is rowptr, "computed once"


def test_from_pairs_takes_what_a_pattern_holds():
    g, *_ = case(7)
    a = AttentionPattern.from_graph(g, num_global=2, hamiltonian_path=True)
    b = AttentionPattern.from_pairs(a.rowptr, a.col, a.pair_type, num_global=2, num_pair_types=4)
    assert pairs_of(a) == pairs_of(b) and a.num_types == b.num_types
    assert torch.equal(a.to_dense(), b.to_dense())


def test_number_of_types():
    rowptr, col = torch.tensor([0, 2, 2]), torch.tensor([0, 1])
    assert AttentionPattern.from_pairs(rowptr, col).num_types == 3
    assert AttentionPattern.from_pairs(rowptr, col).pair_type.tolist() == [0, 0]
    assert AttentionPattern.from_pairs(rowptr, col, torch.tensor([0, 9])).num_types == 12
    assert AttentionPattern.from_pairs(rowptr, col, torch.tensor([0, 9]), num_pair_types=20).num_types == 22
    assert AttentionPattern.from_pairs(torch.tensor([0]), torch.tensor([])).num_types == 3
    many = AttentionPattern.from_pairs(torch.tensor([0, 0, 1]), torch.tensor([1]), torch.tensor([255]), num_global=1)
    assert many.num_types == 258
    assert many.with_globals_as_pairs()[2].tolist() == [256, 256, 257, 255], "types beyond 255 do not wrap around"


R, C = torch.tensor([0, 0, 2, 3]), torch.tensor([1, 2, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.tensor([]), C), "rowptr starts with"),
        ((torch.tensor([0, 2, 1, 3]), C), "rowptr falls from 2 to 1 at row 1"),
        ((torch.tensor([0, 1, 2]), C), "rowptr ends with 2; expected the length of col, 3"),
        ((R.reshape(2, 2), C), r"rowptr has shape \(2, 2\)"),
        ((R.float(), C), "rowptr has dtype torch.float32"),
        ((R, torch.tensor([2, 1, 1])), "col: row 1 is not sorted at column 1"),
        ((R, torch.tensor([1, 1, 1])), "col: row 1 repeats column 1"),
        ((R, torch.tensor([1, 3, 1])), "col contains 3; allowed: 0..2"),
        ((R, torch.tensor([-1, 2, 1])), "col contains -1"),
        ((R, torch.tensor([0, 2, 1]), None, 1), "col contains 0; allowed: 1..2"),
        ((torch.tensor([0, 2, 2, 3]), C, None, 1), "rowptr gives pairs to the first 1 rows"),
        ((R, C, None, 4), "num_global is 4; rowptr has rows for 3 tokens"),
        ((R, C, None, -1), "num_global is -1"),
        ((R, C, torch.tensor([0, 1])), r"pair_type has shape \(2,\); expected \[3\]"),
        ((R, C, torch.tensor([0, 1, 256])), "pair_type contains 256; allowed: 0..255"),
        ((R, C, torch.tensor([0, -1, 2])), "pair_type contains -1"),
        ((R, C, torch.tensor([0, 1, 2]), 0, 2), "pair_type contains 2; allowed: 0..1"),
        ((R, C, torch.tensor([0.0, 1.0, 2.0])), "pair_type has dtype torch.float32"),
    ],
)
def test_invalid_pairs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        AttentionPattern.from_pairs(*arguments)
    assert "\n" not in str(error.value)


def test_other_invalid_arguments():
    g = Graph.from_edge_index(torch.tensor([[0], [1]]), 2)
    for make, message in (
        (lambda: AttentionPattern.from_graph(torch.zeros(2, 1)), "g is a Tensor"),
        (lambda: AttentionPattern.from_graph(g, num_global=-1), "num_global is -1"),
        (lambda: AttentionPattern.from_graph(g).permute(torch.tensor([0, 0])), "order is no permutation: 1 "),
        (lambda: AttentionPattern.from_graph(g, num_global=1).permute(torch.arange(3)), "permutation of 2 nodes"),
        (lambda: AttentionPattern.full(torch.tensor([1, 2])), r"ptr is \[1, 2\]"),
        (lambda: AttentionPattern.full(torch.tensor([0, 3, 2])), r"ptr is \[0, 3, 2\]"),
        (lambda: AttentionPattern.full(torch.tensor([0, 2]), torch.zeros(3, dtype=torch.uint8)), r"expected \[4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("cuts", [[0], [0, 0], [0, 5], [0, 2, 5], [0, 0, 3, 3, 4, 4]])
@pytest.mark.parametrize("typed", [False, True])
def test_full(cuts, typed):
    ptr = torch.tensor(cuts)
    n, pairs = int(ptr[-1]), int(ptr.diff().square().sum())
    generator = torch.Generator().manual_seed(0)
    pair_type = torch.randint(5, (pairs,), generator=generator) if typed else None
    a = AttentionPattern.full(ptr, pair_type, num_pair_types=5)
    assert a.is_full and a.num_pairs == a.num_pairs_computed == pairs and a.num_types == 7
    dense = torch.block_diag(*(torch.ones(size, size) for size in ptr.diff().tolist())).bool()[:n, :n]
    assert torch.equal(a.to_dense(), dense) and len(pairs_of(a)) == pairs

    blocks = [torch.arange(p, q) for p, q in zip(cuts[:-1], cuts[1:], strict=True)]
    whole = torch.cat([block.flip(0) for block in reversed(blocks)]) if blocks else torch.arange(0)
    for order in (whole, torch.randperm(n, generator=generator)):
        b = a.permute(order)
        if order is whole:
            assert b.is_full
        assert torch.equal(b.to_dense(), dense[order][:, order])
        assert torch.equal(b.pair_type, a.pair_type[b.pair_index])
        assert torch.equal(order[b.row_ids().long()], a.row_ids()[b.pair_index].long())
        assert torch.equal(order[b.col.long()], a.col[b.pair_index].long())


def test_a_full_pattern_is_not_laid_out_unasked():
    """16,384 squared pairs would take gigabytes; a dense kernel needs only `ptr`."""
    a = AttentionPattern.full(torch.tensor([0, 16384]))
    b = a.permute(torch.arange(16384).flip(0))
    for pattern in (a, b):
        assert pattern.num_pairs == 16384**2 and pattern.num_tokens == 16384 and pattern.is_full
        assert "16384" in repr(pattern)
        assert pattern._rowptr is None and pattern._col is None and pattern._pair_type is None


def test_moving_keeps_everything():
    g, _, order = case(7)
    a = AttentionPattern.from_graph(g, num_global=1, hamiltonian_path=True).permute(order)
    assert a.to("cpu") is a
    a.transposed()
    moved = a.to("meta")
    assert moved.device.type == moved.col.device.type == moved.pair_type.device.type == "meta"
    assert moved.transposed()[2].device.type == moved.pair_index.device.type == "meta"
    assert (moved.num_tokens, moved.num_types, moved.has_path, moved.num_pairs) == (8, 6, True, a.num_pairs)
    assert AttentionPattern.full(torch.tensor([0, 3])).device.type == "cpu"


def test_names_of_types():
    assert (SELF, EDGE, PATH, ADDED) == (0, 1, 2, 3)
