"""Data sets of your own: `write_node_store` for a module of yours, or files on disk without any code.

The contract of a module: it defines `prepare(out, **options)`, which writes a `GraphStore` to the folder `out`, and may
take `overwrite` and `log`. In the pipeline's configuration

    custom_datasets:
      - {name: my-graph, module: my_package.my_module, options: {nodes: 1000}}

and by hand `python -m datasets.prepare --module my_package.my_module --out DIR --option nodes=1000`. This module keeps
the contract itself, for a graph that lies in files: `module: datasets.custom` with the options of `prepare` below.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchgt.data.store import GraphStore, StoreError, check_destination, metrics_for
from torchgt.graph import Graph

FRACTIONS = (0.6, 0.2, 0.2)


def write_node_store(
    path: str | Path,
    name: str,
    edge_index: Tensor | np.ndarray,
    x: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    *,
    source: Mapping[str, Any],
    seed: int = 0,
    split: Mapping[str, Tensor | np.ndarray] | None = None,
    split_kind: str | None = None,
    target: str = "multiclass",
    metric: str | None = None,
    num_classes: int | None = None,
    symmetrize: bool = False,
    original: Tensor | np.ndarray | None = None,
    overwrite: bool = False,
    **described: Any,
) -> GraphStore:
    """Shuffle the node ids, map everything to the new ids, and write a store with a node task.

    Ids are shuffled because the order of a source often gives the label away, and a path, tiles or clusters laid over
    it would learn from that. The store's array `original` holds each node's id before the shuffle.

    Args:
        path: the folder to make.
        name: the data set's name: letters, digits, '.', '_', '-'.
        edge_index: integer [2, E], source above target: the target attends to the source. Repeats are merged.
        x: [N, F] features.
        y: [N] or [N, T] labels; -1 (integers) or NaN (floats) is unlabelled.
        source: `url`, `sha256`, `licence`, `version` of what was read.
        seed: of the shuffle, and of the split if none is given.
        split: ids under `train`, `valid`, `test`, disjoint; by default 60/20/20 % of the labelled nodes at random.
        split_kind: how `split` came about, "official" by default.
        target: multiclass, multilabel, binary or regression.
        metric: one of `metrics_for(target)`, the first by default.
        num_classes: classes of a multiclass target, the largest label + 1 by default.
        symmetrize: add every reverse edge.
        original: [N] ids to record instead of 0..N-1, for a part cut out of something larger.
        overwrite: replace a store that is there.
        described: further keys of `meta.json`: `class_names`, `cardinalities`, `features`, `edges`, `subset`, `extra`.

    StoreError (a ValueError) names what does not fit; nothing is left behind.
    """
    check_destination(Path(path), overwrite)
    edge_index, x, y = (_array(key, value) for key, value in (("edge_index", edge_index), ("x", x), ("y", y)))
    n = len(x)
    if x.ndim != 2 or n == 0:
        raise StoreError(f"x has shape {list(x.shape)}; allowed: [nodes, features], at least one node")
    if y.ndim not in (1, 2) or len(y) != n:
        raise StoreError(f"y has shape {list(y.shape)}; allowed: [{n}] or [{n}, tasks], one row a row of x")
    metric = metric or metrics_for(target)[0]
    order = np.random.default_rng([seed, 0]).permutation(n)
    inverse = np.empty_like(order)
    inverse[order] = np.arange(n)
    given = Graph.from_edge_index(torch.from_numpy(edge_index), n)  # checks shape, dtype and range of the ids
    graph = given.permute(torch.from_numpy(order))
    graph = graph.symmetrized() if symmetrize else graph
    x, y = x[order], y[order]
    if split is None:
        roles = random_split(y, seed)
        split_kind = f"random {'/'.join(map(str, FRACTIONS))}, seed {seed}"
    else:
        roles = {role: _map_ids(role, ids, inverse) for role, ids in split.items()}
    original = np.arange(n) if original is None else _array("original", original)
    if original.shape != (n,):
        raise StoreError(f"original has shape {list(original.shape)}; allowed: [{n}]")
    meta: dict[str, Any] = {
        "name": name,
        "task": "node",
        "target": target,
        "metric": metric,
        "splits": [{role: f"split/0-{role}.npy" for role in roles}],
        "split_kind": split_kind or "official",
        "directed": not symmetrize and not _is_symmetric(graph),
        "node_shuffle_seed": seed,
        "source": dict(source),
        **described,
    }
    meta["edges"] = {
        "given": int(edge_index.shape[1]),
        "distinct": given.num_edges,
        "symmetrized": symmetrize,
        **described.get("edges", {}),
    }
    if target == "multiclass":
        meta["num_classes"] = int(y.max()) + 1 if num_classes is None else num_classes
    else:
        meta["num_tasks"] = 1 if y.ndim == 1 else y.shape[1]
    arrays = {"rowptr": graph.rowptr, "col": graph.col, "x": x, "y": y, "original": original[order]}
    arrays |= {f"split/0-{role}": ids for role, ids in roles.items()}
    return GraphStore.write(path, meta, arrays, overwrite=overwrite)


def random_split(y: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """60/20/20 % of the labelled rows of `y`, drawn by `seed`: sorted int64 ids under train, valid, test."""
    known = ~np.isnan(y) if y.dtype.kind == "f" else y >= 0
    ids = np.flatnonzero(known if known.ndim == 1 else known.any(axis=1))
    if len(ids) < 3:
        raise StoreError(f"{len(ids)} labelled nodes; allowed: at least 3, one each to train, validate and test")
    ids = np.random.default_rng([seed, 1]).permutation(ids)
    valid = test = max(1, round(FRACTIONS[1] * len(ids)))
    train = len(ids) - valid - test
    parts = np.split(ids, (train, train + valid))
    return {role: np.sort(part) for role, part in zip(("train", "valid", "test"), parts, strict=True)}


def label_agreement(y: np.ndarray) -> tuple[float, float, float]:
    """(share of consecutive ids with equal labels, that of a random order, standard deviation of the latter).

    A share far above chance means that the order of the ids tells about the label.
    """
    counts = np.bincount(y)
    n = max(len(y), 2)
    chance = float((counts * (counts - 1)).sum() / (n * (n - 1)))
    return float((y[1:] == y[:-1]).mean()), chance, (chance * (1 - chance) / (n - 1)) ** 0.5


def prepare(
    out: Path,
    *,
    edges: str,
    features: str,
    labels: str,
    split: Mapping[str, str] | None = None,
    seed: int = 0,
    target: str = "multiclass",
    metric: str | None = None,
    num_classes: int | None = None,
    symmetrize: bool = True,
    source: Mapping[str, str] | None = None,
    overwrite: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> GraphStore:
    """A store, named like its folder, from files; the other options are those of `write_node_store`.

    Args:
        out: the folder to make.
        edges: `.npy` [2, E] or [E, 2] ([2, 2] is read as [2, E]), or text with "source target" in each line. Text may
            separate its numbers by blanks, tabs or commas; lines from `#` on are comments. Ids are 0..N-1.
        features: `.npy` [N, F], or text with a row of numbers a node.
        labels: `.npy` [N] or [N, T], or text with one or T numbers a line.
        split: a file of ids each for train, valid and test.
        source: url, licence and version, where they are known.
    """
    for key, given, keys in (("split", split, ("train", "valid", "test")), ("source", source, None)):
        if given is not None and (not isinstance(given, Mapping) or keys and sorted(given) != sorted(keys)):
            raise StoreError(f"{key} is {given!r}; allowed: an object{' with ' + ', '.join(keys) if keys else ''}")
    check_destination(Path(out), overwrite)
    sha256: dict[str, str] = {}
    floats = target == "regression"

    def read(file: str, integers: bool, columns: bool) -> np.ndarray:
        log(f"reading {file}")
        values, sha256[Path(file).name] = read_numbers(file, integers=integers, columns=columns)
        return values

    edge_index = read(edges, True, True)
    if not (edges.endswith(".npy") and len(edge_index) == 2):  # text always has an edge a line
        edge_index = edge_index.T
    if edge_index.ndim != 2 or len(edge_index) != 2:
        raise StoreError(f"{edges}: has shape {list(edge_index.T.shape)}; allowed: two numbers an edge")
    y = read(labels, not floats and not labels.endswith(".npy"), False)
    return write_node_store(
        out,
        Path(out).name,
        np.ascontiguousarray(edge_index),
        read(features, False, True).astype(np.float32),
        y.astype(np.float32) if floats else y,
        split=None if split is None else {role: read(file, True, False) for role, file in split.items()},
        split_kind=None if split is None else "given",
        source={"url": "", "licence": "", "version": "", **(source or {}), "sha256": sha256},
        seed=seed,
        target=target,
        metric=metric,
        num_classes=num_classes,
        symmetrize=symmetrize,
        overwrite=overwrite,
    )


def read_numbers(file: str | Path, *, integers: bool, columns: bool) -> tuple[np.ndarray, str]:
    """(numbers of a `.npy` or text file, its sha256); text always two-dimensional if `columns`.

    StoreError names the file, and in text the line, that cannot be read.
    """
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise StoreError(f"{file}: cannot be read ({error.strerror}); allowed: a .npy or text file") from None
    try:
        if str(file).endswith(".npy"):
            values = np.load(file, allow_pickle=False)
        else:
            lines = data.decode().replace(",", " ").splitlines()
            values = np.loadtxt(lines, dtype=np.int64 if integers else np.float64, ndmin=2 if columns else 1)
    except (ValueError, EOFError) as error:
        raise StoreError(f"{file}: {' '.join(str(error).split())}") from None
    if integers and values.dtype.kind not in "iu":
        raise StoreError(f"{file}: holds {values.dtype}; allowed: integers")
    return values, hashlib.sha256(data).hexdigest()


def _array(name: str, value: Tensor | np.ndarray) -> np.ndarray:
    value = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if value.dtype.kind not in "iufb":
        raise StoreError(f"{name} holds {value.dtype}; allowed: numbers")
    return value


def _map_ids(role: str, ids: Tensor | np.ndarray, inverse: np.ndarray) -> np.ndarray:
    ids = _array(f"split {role}", ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise StoreError(f"split {role} is {ids.dtype} {list(ids.shape)}; allowed: a list of node ids")
    wrong = (ids < 0) | (ids >= len(inverse))
    if wrong.any():
        raise StoreError(f"split {role} holds {ids[wrong][0]}; allowed: node ids 0..{len(inverse) - 1}")
    return np.sort(inverse[ids])


def _is_symmetric(graph: Graph) -> bool:
    other = graph.transpose()
    return torch.equal(other.rowptr, graph.rowptr) and torch.equal(other.col, graph.col)
