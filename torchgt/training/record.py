"""RunRecord: what one run was and gave, whether it succeeded or not.

Imports neither torch nor numpy: the supervising process writes a record when the trainer could not.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchgt._version import RESULTS_VERSION
from torchgt.errors import ConfigError, unknown
from torchgt.files import write_json_atomic

FORMAT = 1
STATUSES = ("ok", "oom", "timeout", "error", "refused")


@dataclass(kw_only=True)
class RunRecord:
    """The record of one run. Times in seconds, memory in bytes, metrics as fractions.

    Nested fields and their keys: docs/design.md, section "A run and its record".
    """

    status: str
    error: str | None = None
    system: str
    model: str
    dataset: str | None = None
    store_sha256: str | None = None
    split: int = 0
    seed: int = 0
    protocol: str = "standard"
    config: dict[str, Any] = field(default_factory=dict)
    config_sha256: str | None = None
    results_version: int = RESULTS_VERSION
    world_size: int = 1
    parallel: str | None = None
    device: str | None = None
    precision: str = "fp32"
    threads: int | None = None
    seq_len: int | None = None
    num_params: int | None = None
    machine_class: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    time: dict[str, Any] = field(default_factory=dict)
    throughput: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    traffic: dict[str, Any] = field(default_factory=dict)
    pattern: dict[str, Any] = field(default_factory=dict)
    metric: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    budget: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status: {unknown('value', self.status, STATUSES)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a number that is not finite becomes None."""
        return _finite(dataclasses.asdict(self))

    def write(self, path: str | Path) -> None:
        """Write atomically as JSON."""
        write_json_atomic(path, self.to_dict())

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunRecord:
        if values.get("format") != FORMAT:
            raise ConfigError(f"record of format {values.get('format')!r}; this torchgt reads format {FORMAT}")
        fields = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in fields:
                raise ConfigError(unknown("record key", key, fields))
        return cls(**values)

    @classmethod
    def read(cls, path: str | Path) -> RunRecord:
        """Read a record; ConfigError names the file when it is not one."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls.from_dict(values)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not a run record ({error})") from None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
