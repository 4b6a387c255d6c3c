"""Sizes and options of a model, with the published presets."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from torchgt.errors import unknown

# Sizes as in the TorchGT paper's table of models; GT has no global token unless it is asked for.
_PRESETS: dict[str, dict[str, int]] = {
    "graphormer-slim": {"layers": 4, "hidden": 64, "heads": 8, "ffn": 64, "num_global": 1},
    "graphormer-large": {"layers": 12, "hidden": 768, "heads": 32, "ffn": 768, "num_global": 1},
    "gt": {"layers": 4, "hidden": 128, "heads": 8, "ffn": 256, "num_global": 0},
}
INITIALISATIONS = ("fan_in", "published")
MODEL_NAMES: tuple[str, ...] = tuple(_PRESETS)


def preset_width(name: str) -> int:
    """Hidden width of a preset. ValueError for an unknown name."""
    _check_name(name)
    return _PRESETS[name]["hidden"]


def _check_name(name: str) -> None:
    if name not in _PRESETS:
        raise ValueError(unknown("model", name, MODEL_NAMES))


@dataclass(kw_only=True)
class ModelConfig:
    """Everything that decides a model's parameters and its dropout. Raises ValueError on values that cannot work."""

    name: str
    """one of MODEL_NAMES; selects the architecture"""
    in_features: int
    """columns of the node features"""
    num_outputs: int
    """classes or tasks: columns of the logits"""
    layers: int
    """transformer layers"""
    hidden: int
    """width of the residual stream; a multiple of `heads`"""
    heads: int
    """attention heads"""
    ffn: int
    """width of the feed-forward network's inner layer"""
    dropout: float = 0.1
    """probability of dropping an output of the attention or feed-forward branch"""
    input_dropout: float = 0.1
    """probability of dropping an encoded input"""
    attention_dropout: float = 0.0
    """probability of dropping an attention weight"""
    num_global: int = 1
    """learned tokens that stand before the nodes and attend to, and are attended by, all"""
    type_bias: bool = True
    """learn a bias per pair type and head, shared by all layers"""
    num_types: int = 6
    """rows of the bias table: the pattern's stored types, then from and to a global token"""
    type_bias_init: tuple[float, ...] | None = None
    """first value of each row of the bias table (num_types numbers); zeros if None"""
    initialisation: str = "fan_in"
    """"fan_in": torch's default for linear layers; "published": N(0, 0.02 / sqrt(layers)), which learns more slowly"""
    activation_checkpointing: bool = False
    """keep only each layer's input and recompute the rest in the backward pass"""

    def __post_init__(self) -> None:
        _check_name(self.name)
        for key, least in (
            ("in_features", 1),
            ("num_outputs", 1),
            ("layers", 1),
            ("hidden", 1),
            ("heads", 1),
            ("ffn", 1),
            ("num_global", 0),
            ("num_types", 1),
        ):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{key}: expected an integer of at least {least}, found {value!r}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden: {self.hidden} is not a multiple of heads ({self.heads})")
        for key in ("dropout", "input_dropout", "attention_dropout"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
                raise ValueError(f"{key}: expected a probability in [0, 1), found {value!r}")
        if self.initialisation not in INITIALISATIONS:
            raise ValueError(f"initialisation: {unknown('value', self.initialisation, INITIALISATIONS)}")
        self._check_bias_init()

    def _check_bias_init(self) -> None:
        if self.type_bias_init is None:
            return
        self.type_bias_init = tuple(float(value) for value in self.type_bias_init)
        if len(self.type_bias_init) != self.num_types:
            raise ValueError(
                f"type_bias_init: expected {self.num_types} numbers (num_types), found {len(self.type_bias_init)}"
            )
        if not all(math.isfinite(value) for value in self.type_bias_init):
            raise ValueError(f"type_bias_init: expected finite numbers, found {self.type_bias_init}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @classmethod
    def preset(cls, name: str, **overrides: object) -> ModelConfig:
        """The published sizes of model `name`; keywords add the data's sizes and override the rest.

        Raises ValueError for an unknown name or keyword, naming the nearest one that exists.
        """
        _check_name(name)
        allowed = [field.name for field in fields(cls) if field.name != "name"]
        for key in overrides:
            if key not in allowed:
                raise ValueError(unknown("model option", key, allowed))
        for key in ("in_features", "num_outputs"):
            if key not in overrides:
                raise ValueError(f"{key}: missing, model {name!r} takes it from the data")
        return cls(name=name, **{**_PRESETS[name], **overrides})
