"""gp-sparse: the graph's pairs by gather and scatter, as the published artifact and most libraries compute them.

The same model, pairs and biases as TorchGT's sparse step before augmentation; only the implementation differs.
"""

from __future__ import annotations

import torchgt
from torchgt.training.system import TransformerSystem


class SparseGP(TransformerSystem):
    """Every step over the graph's pairs, self-loops and the model's global token."""

    impl = "scatter"


torchgt.register_system("gp-sparse", SparseGP)
