"""gp-raw: Graphormer as published. Dense attention with a learned bias for each shortest-path distance.

Source: Ying et al., "Do Transformers Really Perform Bad for Graph Representation?" (NeurIPS 2021). Distances are
clipped: "farther than the limit" and "unreachable" have ids of their own, and so has a pair with the global token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import torchgt
from torchgt.data.store import GraphStore
from torchgt.graph import Graph
from torchgt.models.encodings import shortest_path_types
from torchgt.parallel import SequenceParallel
from torchgt.pattern import AttentionPattern
from torchgt.training.config import RunConfig
from torchgt.training.system import TransformerSystem


class RawGP(TransformerSystem):
    """Every step fully connected, with the shortest-path bias as an additive mask."""

    attention = "full"
    type_bias = True
    dense_bias = True
    type_bias_init = None
    OPTIONS: dict[str, Any] = {"max_distance": 8}

    def __init__(self, config: RunConfig, store: GraphStore, parallel: SequenceParallel) -> None:
        super().__init__(config, store, parallel)
        # ids: 0..max_distance, farther, unreachable, padding, with a global token
        self.num_ids = self.options["max_distance"] + 5
        self.model_config = dataclasses.replace(self.model_config, num_types=self.num_ids + 2)

    def dense_pattern(self, graph: Graph) -> AttentionPattern:
        with self.timed("shortest_paths_s"):
            num_global = self.model_config.num_global
            tokens = num_global + graph.num_nodes
            ids = torch.full((tokens, tokens), self.num_ids - 1, dtype=torch.uint8)
            ids[num_global:, num_global:] = shortest_path_types(graph, self.options["max_distance"])
            return AttentionPattern.full(
                torch.tensor([0, tokens]), pair_type=ids.reshape(-1), num_pair_types=self.num_ids
            )


torchgt.register_system("gp-raw", RawGP)
