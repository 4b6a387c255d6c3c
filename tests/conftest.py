"""Fixtures that several kinds of test share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torchgt


def write_block_store(path: Path, num_nodes: int = 240, num_classes: int = 4, seed: int = 0, **changes) -> Path:
    """A small store whose graph says more than its features: a planted partition with noisy one-hot features.

    Keywords replace keys of the description or, where they name one, arrays.
    """
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(num_nodes) % num_classes
    source = torch.randint(num_nodes, (4 * num_nodes,), generator=generator)
    step = torch.randint(1, num_nodes // num_classes, (4 * num_nodes,), generator=generator)
    target = (source + num_classes * step) % num_nodes
    target[::10] = (target[::10] + 1) % num_nodes  # one edge in ten leaves its class
    graph = torchgt.Graph.from_edge_index(torch.stack([source, target]), num_nodes, symmetrize=True)
    x = torch.nn.functional.one_hot(y, num_classes).float() * 0.5
    x = x + torch.randn(num_nodes, num_classes, generator=generator)
    nodes = torch.randperm(num_nodes, generator=generator)
    a, b = int(0.6 * num_nodes), int(0.8 * num_nodes)
    meta = {
        "name": "blocks",
        "task": "node",
        "target": "multiclass",
        "num_classes": num_classes,
        "metric": "accuracy",
        "splits": [{name: f"split/0-{name}.npy" for name in ("train", "valid", "test")}],
        "split_kind": "random 0.6/0.2/0.2, 0",
        "directed": False,
        "node_shuffle_seed": 0,
        "source": {"url": None, "sha256": None, "licence": "none", "version": "1"},
    }
    arrays = {
        "rowptr": graph.rowptr,
        "col": graph.col,
        "x": x,
        "y": y,
        "split/0-train": nodes[:a].sort().values,
        "split/0-valid": nodes[a:b].sort().values,
        "split/0-test": nodes[b:].sort().values,
    }
    for key, value in changes.items():
        (arrays if key in arrays else meta)[key] = value
    torchgt.GraphStore.write(path, meta, arrays)
    return path


@pytest.fixture
def block_store(tmp_path: Path) -> Path:
    return write_block_store(tmp_path / "blocks")
