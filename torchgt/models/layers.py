"""Parts that both models share: the attention sub-layer, dropout sites, global tokens, initialisation.

Legend of shape suffixes: N tokens on this worker (global tokens included), C hidden width, F features, H heads,
D head width, T pair types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.utils.checkpoint
from torch import nn

from torchgt.attention import graph_attention, token_dropout
from torchgt.models.batch import Batch
from torchgt.models.config import ModelConfig

if TYPE_CHECKING:
    from torchgt.pattern import AttentionPattern
    from torchgt.reformation import Reformation

# An odd constant near 2^64 / golden ratio, as int64: multiples of it spread over all 64 bits, so the seeds of a step's
# dropout sites neither repeat each other nor those of neighbouring steps.
_SITE_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)


def _site_seed(seed: torch.Tensor, site: int) -> torch.Tensor:
    stride = (_SITE_STRIDE * site + (1 << 63)) % (1 << 64) - (1 << 63)  # reduced to int64 as the addition wraps
    return seed + stride


@dataclass
class Step:
    """One forward pass as its layers see it: where tokens stand, how they attend, what is dropped."""

    attention: Callable[..., torch.Tensor]
    """(query, key, value, pattern, **keywords): on one process or over the workers"""
    pattern: AttentionPattern | Reformation
    first_token: int
    """sequence position of this worker's first row, global tokens counted"""
    seed: torch.Tensor | None
    type_bias_TH: torch.Tensor | None
    pair_bias: torch.Tensor | None
    impl: str

    def dropout(self, x_NC: torch.Tensor, p: float, site: int) -> torch.Tensor:
        """Drops elements by a hash of (site's seed, token, channel): equal for every split over workers."""
        if self.seed is None or p == 0.0 or x_NC.shape[0] == 0:
            return x_NC
        return token_dropout(x_NC, p, _site_seed(self.seed, site), token_offset=self.first_token)

    def attend(
        self, q_NHD: torch.Tensor, k_NHD: torch.Tensor, v_NHD: torch.Tensor, p: float, site: int
    ) -> torch.Tensor:
        """Attention over the step's pattern, with the step's biases."""
        drops = self.seed is not None and p > 0.0
        return self.attention(
            q_NHD,
            k_NHD,
            v_NHD,
            self.pattern,
            pair_bias=self.pair_bias,
            type_bias=self.type_bias_TH,
            dropout_p=p if drops else 0.0,
            dropout_seed=_site_seed(self.seed, site) if drops else None,
            impl=self.impl,
        )


class Attention(nn.Module):
    """Multi-head attention over the step's pattern: one projection to queries, keys and values, one back."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.dropout, self.site = config.attention_dropout, 1 + 3 * layer
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x_NC: torch.Tensor, step: Step) -> torch.Tensor:
        qkv_N3HD = self.qkv(x_NC).view(-1, 3, self.heads, self.head_dim)
        out_NHD = step.attend(*qkv_N3HD.unbind(1), self.dropout, self.site)
        return self.out(out_NHD.reshape(-1, self.heads * self.head_dim))


class FeedForward(nn.Module):
    """Two linear maps with an activation between them."""

    def __init__(self, config: ModelConfig, activation: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Linear(config.hidden, config.ffn)
        self.activation = activation
        self.outer = nn.Linear(config.ffn, config.hidden)

    def forward(self, x_NC: torch.Tensor) -> torch.Tensor:
        return self.outer(self.activation(self.inner(x_NC)))


class TokenModel(nn.Module):
    """Encoder, global tokens, bias table and layers; a model adds its layer and its head.

    The first `num_global` tokens of a sequence are learned. Worker 0 holds them before its nodes.
    """

    def __init__(self, config: ModelConfig, layer_class: type[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.encoder = nn.Linear(config.in_features, config.hidden)
        self.global_tokens = nn.Parameter(torch.empty(config.num_global, config.hidden)) if config.num_global else None
        self.type_bias = nn.Parameter(torch.empty(config.num_types, config.heads)) if config.type_bias else None
        self.layers = nn.ModuleList(layer_class(config, index) for index in range(config.layers))

    def reset_parameters(self) -> None:
        """Linear layers by `config.initialisation`, global tokens N(0, 0.02), bias table by `config.type_bias_init`.

        The default is torch's own: with the published N(0, 0.02 / sqrt(layers)) a graphormer-slim of width 64 is two
        points of accuracy behind after 40 epochs of WordNet. See docs/design.md.
        """
        std = 0.02 / math.sqrt(self.config.layers)
        for module in self.modules():
            if isinstance(module, nn.Linear) and self.config.initialisation == "published":
                nn.init.normal_(module.weight, 0.0, std)
                nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.Linear, nn.LayerNorm)):
                module.reset_parameters()
        if self.global_tokens is not None:
            nn.init.normal_(self.global_tokens, 0.0, 0.02)
        if self.type_bias is not None:
            rows = self.config.type_bias_init or (0.0,) * self.config.num_types
            with torch.no_grad():
                self.type_bias.copy_(torch.tensor(rows).unsqueeze(1).expand_as(self.type_bias))

    def encode_tokens(self, batch: Batch) -> torch.Tensor:
        """Final hidden state [N_r, C] of this worker's nodes; ValueError if batch and model do not fit."""
        if batch.x.shape[1] != self.config.in_features:
            raise ValueError(f"x: expected {self.config.in_features} features, found {batch.x.shape[1]}")
        x_NC = self.encoder(batch.x)
        num_global = self.config.num_global if batch.parallel is None or batch.parallel.rank == 0 else 0
        if num_global:
            x_NC = torch.cat((self.global_tokens.to(x_NC.dtype), x_NC))
        step = self._step(batch, x_NC.shape[0])
        x_NC = step.dropout(x_NC, self.config.input_dropout, site=0)
        for layer in self.layers:
            if self.config.activation_checkpointing and self.training:
                # Nothing draws from torch's generators (dropout hashes its own seed), so their state needs no saving.
                x_NC = torch.utils.checkpoint.checkpoint(
                    layer, x_NC, step, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_NC = layer(x_NC, step)
        return x_NC[num_global:]

    def _step(self, batch: Batch, num_tokens: int) -> Step:
        """Checks the batch's places in the sequence and fixes how this pass attends."""
        if batch.pattern is None:
            raise ValueError(f"pattern: {type(self).__name__} needs an attention pattern, found None")
        parallel, num_global = batch.parallel, self.config.num_global
        is_first = parallel is None or parallel.rank == 0
        first_token = 0 if is_first else num_global + batch.token_offset
        if parallel is None or parallel.world_size == 1:
            if batch.token_offset or num_tokens != batch.pattern.num_tokens:
                raise ValueError(
                    f"pattern: has {batch.pattern.num_tokens} tokens, but the batch has {num_tokens} "
                    f"({num_global} global) from position {batch.token_offset}"
                )
            attention = graph_attention
        else:
            # One exchange a pass instead of one a layer.
            start = batch.token_offset if is_first else first_token
            sizes = parallel.gather_sizes(num_tokens, start, batch.pattern, batch.pair_bias)
            attention = partial(parallel.attention, sizes=sizes)
        return Step(
            attention=attention,
            pattern=batch.pattern,
            first_token=first_token,
            seed=batch.dropout_seed if self.training else None,
            type_bias_TH=self.type_bias if batch.use_type_bias else None,
            pair_bias=batch.pair_bias,
            impl=batch.impl,
        )
