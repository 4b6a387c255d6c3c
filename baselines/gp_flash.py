"""gp-flash: Graphormer or GT with dense FlashAttention, which takes no bias.

The flash kernel is pinned: where it cannot run the system refuses rather than falling back to another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.nn.attention import SDPBackend, sdpa_kernel

import torchgt
from torchgt.errors import RefusedError
from torchgt.models import Batch
from torchgt.training.system import TransformerSystem


class FlashGP(TransformerSystem):
    """Every step fully connected over its sequence, without structural bias."""

    attention = "full"
    type_bias = False

    @contextlib.contextmanager
    def step_context(self, batch: Batch) -> Iterator[None]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            try:
                yield
            except RuntimeError as error:
                if "No available kernel" in str(error):
                    raise RefusedError(f"gp-flash: the flash kernel cannot run here ({error})") from error
                raise


torchgt.register_system("gp-flash", FlashGP)
