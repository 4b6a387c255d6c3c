"""Configuration of one training run: keyword-only dataclasses, validated where they are made.

This is the one place where options are defined. It imports neither torch nor numpy, so that the supervising
process can validate a file in milliseconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torchgt._version import RESULTS_VERSION
from torchgt.errors import ConfigError, unknown

PROTOCOLS = ("standard", "artifact")
PRECISIONS = ("fp32", "bf16", "fp64")
SEQUENCE_KINDS = ("full", "clusters", "random")
EVALUATION_KINDS = ("auto", "whole", "clusters")
CONDITION_POLICIES = ("augment", "dense", "sparse")
STRATEGIES = ("all_to_all",)
DEVICES = ("auto", "cpu", "cuda")


def _choice(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}: {unknown('value', value, allowed)}")


def _range(key: str, value: float, low: float, high: float = math.inf, *, open_high: bool = False) -> None:
    inside = low <= value < high if open_high else low <= value <= high
    if not inside:  # also catches NaN
        raise ConfigError(f"{key}: {value!r} is outside [{low}, {high}{')' if open_high or high == math.inf else ']'}")


@dataclass(kw_only=True)
class OptimConfig:
    """AdamW with linear warm-up and polynomial (power 1) decay, both per step."""

    lr: float = 5e-3
    """Peak learning rate."""
    end_lr: float = 1e-9
    """Learning rate at the last step."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    warmup_epochs: float = 5.0
    """Epochs of linear warm-up; may be fractional, at most half of all epochs are used."""
    grad_clip: float = 1.0
    """Largest 2-norm of all gradients together; 0 turns clipping off."""
    patience: int = 0
    """Stop after this many evaluations without a better validation value; 0 never stops early."""

    def __post_init__(self) -> None:
        _range("optim.lr", self.lr, 0.0)
        _range("optim.end_lr", self.end_lr, 0.0, self.lr)
        _range("optim.weight_decay", self.weight_decay, 0.0)
        _range("optim.warmup_epochs", self.warmup_epochs, 0.0)
        _range("optim.grad_clip", self.grad_clip, 0.0)
        _range("optim.patience", self.patience, 0)


@dataclass(kw_only=True)
class ScheduleConfig:
    """Dual-interleaved attention: which steps are fully connected."""

    dense_every: int = 10
    """Every k-th step is fully connected; 0 means never."""
    dense_tokens: int = 4096
    """Most node tokens of a fully connected step. A longer sequence is replaced by a fresh union of clusters."""
    dense_bias: bool = True
    """Fully connected steps keep the model's biases, those of graph edges too; false drops them for FlashAttention."""
    on_conditions_fail: str = "augment"
    """What to do where the pattern's conditions C1-C3 do not hold: augment, dense or sparse."""

    def __post_init__(self) -> None:
        _range("schedule.dense_every", self.dense_every, 0)
        _range("schedule.dense_tokens", self.dense_tokens, 1)
        _choice("schedule.on_conditions_fail", self.on_conditions_fail, CONDITION_POLICIES)


@dataclass(kw_only=True)
class SequenceConfig:
    """Which nodes a training step sees."""

    kind: str = "full"
    """full: all nodes; clusters: unions of METIS clusters, drawn anew each epoch; random: as published."""
    tokens: int = 0
    """Most node tokens of a sequence (clusters and random)."""
    cluster_tokens: int = 256
    """Aimed size of a METIS cluster; also sets the cluster-aware order of a full sequence."""

    def __post_init__(self) -> None:
        _choice("sequence.kind", self.kind, SEQUENCE_KINDS)
        _range("sequence.tokens", self.tokens, 0)
        _range("sequence.cluster_tokens", self.cluster_tokens, 1)
        if self.kind != "full" and self.tokens < 1:
            raise ConfigError(f"sequence.tokens: {self.tokens} with kind {self.kind!r}; allowed: at least 1")


@dataclass(kw_only=True)
class EvaluationConfig:
    """How and when the splits are scored. Every node counts once."""

    every: int = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    kind: str = "auto"
    """whole: one pass over the whole graph; clusters: disjoint cluster sequences; auto: whole where affordable."""
    metric: str | None = None
    """Another metric than the store's own; must fit its target."""

    def __post_init__(self) -> None:
        _range("evaluation.every", self.every, 1)
        _choice("evaluation.kind", self.kind, EVALUATION_KINDS)


@dataclass(kw_only=True)
class BudgetConfig:
    """Limits that the supervisor enforces. A run that meets one becomes a record that says so."""

    seconds: float | None = None
    """Wall-clock seconds of the whole run; none: unlimited."""
    memory_bytes: int | None = None
    """Private memory on top of what the imports take (RLIMIT_DATA), bytes; none: unlimited."""

    def __post_init__(self) -> None:
        for key in ("seconds", "memory_bytes"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ConfigError(f"budget.{key}: {value!r}; allowed: a positive number, or null")


@dataclass(kw_only=True)
class ParallelConfig:
    """How a sequence is shared by several processes."""

    strategy: str = "all_to_all"
    """Exchange of queries, keys, values and outputs between sequence shares and head shares."""

    def __post_init__(self) -> None:
        _choice("parallel.strategy", self.strategy, STRATEGIES)


@dataclass(kw_only=True)
class RunConfig:
    """One run: one system trained on one store with one seed."""

    system: str
    """Registered name, see `torchgt.register_system`."""
    store: str
    """Folder of a GraphStore."""
    model: str = "graphormer-slim"
    """Model preset of the graph transformers; message-passing systems take their width and depth from it."""
    seed: int = 0
    """Seeds initialisation, dropout, partitioning and sampling."""
    split: int = 0
    """Which of the store's splits."""
    protocol: str = "standard"
    """standard: the store's split, test at the best validation epoch; artifact: random split, best test"""
    precision: str = "fp32"
    """fp32, bf16 (autocast, float32 parameters) or fp64."""
    device: str = "auto"
    """auto takes the GPU of this rank if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves torch's choice."""
    epochs: int = 100
    dropout: float = 0.1
    input_dropout: float = 0.1
    attention_dropout: float = 0.0
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    sequence: SequenceConfig = field(default_factory=SequenceConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint_every: int = 1
    """Epochs between checkpoints."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    options: dict[str, Any] = field(default_factory=dict)
    """The system's own options; it refuses those it does not know."""
    plugins: list[str] = field(default_factory=list)
    """Modules to import before the system's name is looked up."""
    results_version: int = RESULTS_VERSION
    """Which generation of this software's numbers the run belongs to."""

    def __post_init__(self) -> None:
        _choice("protocol", self.protocol, PROTOCOLS)
        _choice("precision", self.precision, PRECISIONS)
        _choice("device", self.device, DEVICES)
        _range("seed", self.seed, 0, 2**31, open_high=True)
        _range("split", self.split, 0)
        _range("threads", self.threads, 0)
        _range("epochs", self.epochs, 1)
        _range("checkpoint_every", self.checkpoint_every, 1)
        for key in ("dropout", "input_dropout", "attention_dropout"):
            _range(key, getattr(self, key), 0.0, 1.0, open_high=True)
        if self.results_version != RESULTS_VERSION:
            raise ConfigError(f"results_version: {self.results_version}; this torchgt makes version {RESULTS_VERSION}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """Build from plain values; unknown keys and wrong types raise ConfigError naming the dotted key."""
        return build(cls, values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> RunConfig:
        """Read a YAML file; every error names the file."""
        return load_yaml(cls, path)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def sha256(self) -> str:
        """Digest of the canonical JSON form: what a checkpoint and a record are tied to."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def load_yaml(cls: type, path: str | Path) -> Any:
    """Read `path` as YAML into the dataclass `cls`; every error is a ConfigError that names the file."""
    try:
        return build(cls, read_yaml(path))
    except ConfigError as error:
        prefix = "" if str(error).startswith(f"{path}: ") else f"{path}: "
        raise ConfigError(f"{prefix}{error}") from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; every error is a ConfigError that names the file."""
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds {type(values).__name__}; allowed: a mapping of keys to values")
    return values


def build(cls: type, values: dict[str, Any], prefix: str = "") -> Any:
    """Build the dataclass `cls` from plain values, recursively, refusing unknown keys and wrong types."""
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(unknown("key", f"{prefix}{key}", [f"{prefix}{name}" for name in fields]))
        arguments[key] = _convert(f"{prefix}{key}", value, hints[key])
    required = (f.name for f in fields.values() if f.default is f.default_factory is dataclasses.MISSING)
    missing = [f"{prefix}{name}" for name in required if name not in arguments]
    if missing:
        raise ConfigError(f"missing key {missing[0]!r}")
    return cls(**arguments)


def _convert(key: str, value: Any, hint: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{key}: {value!r}; allowed: a mapping")
        return build(hint, value, prefix=f"{key}.")
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return _convert(key, value, option)
        origin = typing.get_origin(option) or option
        if origin in (float, int) and isinstance(value, str):  # YAML 1.1 reads 1e-3 as a string
            try:
                number = float(value)
            except ValueError:
                continue
            if origin is float or number.is_integer():
                return origin(number)
        if origin is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if origin is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, bool) and origin is not bool:
            continue
        if isinstance(origin, type) and isinstance(value, origin):
            if typing.get_args(option) == (str,) and not all(isinstance(item, str) for item in value):
                continue
            return value
    names = " or ".join("null" if o is type(None) else getattr(o, "__name__", str(o)) for o in options)
    raise ConfigError(f"{key}: {value!r} is of type {type(value).__name__}; allowed: {names}")
