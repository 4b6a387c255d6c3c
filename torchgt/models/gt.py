"""GT, the graph transformer of Dwivedi and Bresson (2021): post-norm layers, ReLU, a small MLP as readout.

Layer normalisation stands in for the original's batch normalisation, whose statistics would depend on how a sequence
is split over workers. The feed-forward network reads the residual stream, as in the original.
"""

from __future__ import annotations

import torch
from torch import nn

from torchgt.models.batch import Batch
from torchgt.models.config import ModelConfig
from torchgt.models.layers import Attention, FeedForward, Step, TokenModel


class GTLayer(nn.Module):
    """h = norm(x + attention(x)), then norm(h + ffn(h))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.dropout, self.site = config.dropout, 2 + 3 * layer
        self.attention = Attention(config, layer)
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.ffn = FeedForward(config, nn.ReLU())
        self.ffn_norm = nn.LayerNorm(config.hidden)

    def forward(self, x_NC: torch.Tensor, step: Step) -> torch.Tensor:
        h_NC = self.attention_norm(x_NC + step.dropout(self.attention(x_NC, step), self.dropout, self.site))
        return self.ffn_norm(h_NC + step.dropout(self.ffn(h_NC), self.dropout, self.site + 1))


class GT(TokenModel):
    """`forward(batch)` gives logits [N_r, num_outputs] of the batch's nodes.

    The readout is three linear layers that halve the width twice, with ReLU between them. Dropout and errors are as
    in `Graphormer`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, GTLayer)
        half, quarter = max(1, config.hidden // 2), max(1, config.hidden // 4)
        self.readout = nn.Sequential(
            nn.Linear(config.hidden, half),
            nn.ReLU(),
            nn.Linear(half, quarter),
            nn.ReLU(),
            nn.Linear(quarter, config.num_outputs),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As Graphormer, except that the readout keeps torch's own initialisation.

        Three maps of N(0, 0.02 / sqrt(layers)) in a row shrink logits and gradients by orders of magnitude, and
        training would hardly move for many epochs.
        """
        super().reset_parameters()
        for module in self.readout:
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.readout(self.encode_tokens(batch))
