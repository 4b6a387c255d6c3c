"""Systems that fail in the ways that runs fail, for the supervisor's tests."""

import time

import torch

import torchgt
from torchgt.errors import RefusedError
from torchgt.training.system import TorchGT


class Hungry(TorchGT):
    def train_batch(self, nodes_N, kind, step):
        self.hoard = [torch.ones(2**26) for _ in range(64)]  # 16 GiB
        return super().train_batch(nodes_N, kind, step)


class Sleepy(TorchGT):
    def train_batch(self, nodes_N, kind, step):
        if step >= 2:
            time.sleep(120)
        return super().train_batch(nodes_N, kind, step)


class Broken(TorchGT):
    def train_batch(self, nodes_N, kind, step):
        raise KeyError("a defect")


class Refusing(TorchGT):
    def prepare(self):
        raise RefusedError("no such kernel here")


for factory in (Hungry, Sleepy, Broken, Refusing):
    torchgt.register_system(factory.__name__.lower(), factory)
