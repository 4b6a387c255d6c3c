"""The systems that TorchGT is measured against, and the controls. Importing this package registers them all."""

from baselines import controls, gnn, gp_flash, gp_raw, gp_sparse

__all__ = ["controls", "gnn", "gp_flash", "gp_raw", "gp_sparse"]
