"""Attention over token pairs: one public function, several implementations behind it.

`graph_attention` validates and dispatches; the implementations in `impl/` never import each other, so that each
can be read, tested and timed alone. `token_dropout` is the matching dropout over token features, and
`available_impls` tells which implementations can run here and why the others cannot.
"""

from torchgt.attention.api import IMPLEMENTATIONS, available_impls, graph_attention, graph_attention_with_lse
from torchgt.attention.dropout import token_dropout

__all__ = ["IMPLEMENTATIONS", "available_impls", "graph_attention", "graph_attention_with_lse", "token_dropout"]
