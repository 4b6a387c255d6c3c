"""gcn and sage: message passing with PyG's layers, what a user would pick instead of a graph transformer.

Residual connections and layer normalisation as in Luo et al., "Classic GNNs are Strong Baselines" (NeurIPS 2024).
torch_geometric takes seconds to import: only when a model is built.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgt
from torchgt.graph import Graph
from torchgt.models import Batch
from torchgt.models.config import preset_width
from torchgt.training.system import GraphSystem


class MessagePassingNet(nn.Module):
    """Input layer, `layers` residual message-passing layers, linear head."""

    def __init__(self, convolutions: list[nn.Module], in_features: int, hidden: int, num_outputs: int, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.encode = nn.Linear(in_features, hidden)
        self.convolutions = nn.ModuleList(convolutions)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in convolutions)
        self.head = nn.Linear(hidden, num_outputs)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [N, C] of the batch's nodes."""
        h_NC = self.encode(batch.x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            message_NC = F.relu(convolution(norm(h_NC), batch.graph))
            h_NC = h_NC + F.dropout(message_NC, self.dropout, self.training)
        return self.head(h_NC)


class MessagePassingSystem(GraphSystem):
    """A PyG convolution by name. Options: `layers`, and `hidden` (default: the width of the model preset)."""

    convolution = ""
    arguments: dict[str, Any] = {}
    OPTIONS: dict[str, Any] = {"hidden": None, "layers": 3}
    imports = ("torch_geometric.nn",)

    def graph_input(self, graph: Graph) -> Tensor:
        """The adjacency as sparse CSR: row = target, column = source, what PyG calls adj_t and multiplies fastest."""
        values = torch.ones(graph.num_edges, dtype=self.dtype)
        size = (graph.num_nodes, graph.num_nodes)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
            adjacency = torch.sparse_csr_tensor(
                graph.rowptr, graph.col.long(), values, size=size, check_invariants=False
            )
        return adjacency.to(self.device)

    def build_model(self) -> nn.Module:
        import torch_geometric.nn as pyg

        hidden = self.options["hidden"] or preset_width(self.config.model)
        layer = getattr(pyg, self.convolution)
        convolutions = [layer(hidden, hidden, **self.arguments) for _ in range(self.options["layers"])]
        net = MessagePassingNet(convolutions, self.x_NF.shape[1], hidden, self.num_outputs, dropout=self.config.dropout)
        return net.to(device=self.device, dtype=self.dtype)


class GCN(MessagePassingSystem):
    """Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks" (ICLR 2017)."""

    convolution = "GCNConv"


class SAGE(MessagePassingSystem):
    """Hamilton et al., "Inductive Representation Learning on Large Graphs" (NeurIPS 2017), mean aggregation."""

    convolution = "SAGEConv"


torchgt.register_system("gcn", GCN)
torchgt.register_system("sage", SAGE)
