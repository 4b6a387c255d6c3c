"""Attention of other libraries with the arguments of `graph_attention`, for `torchgt bench attention --impl`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch_geometric.nn import TransformerConv


def pyg_transformer_conv(query: Tensor, key: Tensor, value: Tensor, pattern, **keywords) -> Tensor:
    """The attention of PyG's TransformerConv (Shi et al. 2021), its linear maps left out.

    Args: as for `torchgt.graph_attention`, of which it takes neither biases nor global tokens nor dropout.
    Raises ValueError for those.
    """
    asked = [name for name, value in keywords.items() if name in ("pair_bias", "type_bias") and value is not None]
    asked += ["dropout_p"] * bool(keywords.get("dropout_p")) + ["num_global"] * bool(pattern.num_global)
    if asked:
        raise ValueError(f"{asked[0]}: TransformerConv takes none")
    heads, dim = query.shape[1:]
    edge_index = pattern._cache.setdefault(
        "baselines.edge_index", (torch.stack((pattern.col.long(), pattern.row_ids().long())),)
    )[0]
    size = (pattern.num_tokens, pattern.num_tokens)
    return _conv(heads, dim).propagate(edge_index, query=query, key=key, value=value, edge_attr=None, size=size)


@functools.cache
def _conv(heads: int, dim: int) -> TransformerConv:
    return TransformerConv(heads * dim, dim, heads=heads, root_weight=False, bias=False)
