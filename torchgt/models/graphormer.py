"""Graphormer for long node sequences: pre-norm layers, GELU, global tokens, one bias table for all layers.

After Ying et al. 2021, "Do Transformers Really Perform Bad for Graph Representation?", in the sizes TorchGT trains:
linear input encoder, no positional encoding, linear head on the node tokens.
"""

from __future__ import annotations

import torch
from torch import nn

from torchgt.models.batch import Batch
from torchgt.models.config import ModelConfig
from torchgt.models.layers import Attention, FeedForward, Step, TokenModel


class GraphormerLayer(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.dropout, self.site = config.dropout, 2 + 3 * layer
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config, layer)
        self.ffn_norm = nn.LayerNorm(config.hidden)
        self.ffn = FeedForward(config, nn.GELU())

    def forward(self, x_NC: torch.Tensor, step: Step) -> torch.Tensor:
        x_NC = x_NC + step.dropout(self.attention(self.attention_norm(x_NC), step), self.dropout, self.site)
        return x_NC + step.dropout(self.ffn(self.ffn_norm(x_NC)), self.dropout, self.site + 1)


class Graphormer(TokenModel):
    """`forward(batch)` gives logits [N_r, num_outputs] of the batch's nodes.

    Dropout is active in training mode for a batch that carries a `dropout_seed`. Raises ValueError if the batch does
    not fit (features, number of tokens, no pattern).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, GraphormerLayer)
        self.final_norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.num_outputs)
        self.reset_parameters()

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.head(self.final_norm(self.encode_tokens(batch)))
