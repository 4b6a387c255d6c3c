"""Sequences split over workers: processes with a GPU each (NCCL), or on CPUs (gloo).

Models are written for one process; `SequenceParallel.attention` is the one place where workers meet in a forward or
backward pass, `SequenceParallel.all_reduce_gradients` the one after it.
"""

from torchgt.parallel.groups import init_distributed, shutdown_distributed
from torchgt.parallel.sequence import STRATEGIES, SequenceParallel
from torchgt.parallel.traffic import Traffic

__all__ = ["STRATEGIES", "SequenceParallel", "Traffic", "init_distributed", "shutdown_distributed"]
