"""Which systems there are. A module registers its own with `register_system` when it is imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torchgt.errors import ConfigError, unknown

if TYPE_CHECKING:
    from torchgt.training.system import System

SystemFactory = Callable[..., "System"]
_factories: dict[str, SystemFactory] = {}


def register_system(name: str, factory: SystemFactory) -> None:
    """Make `name` trainable: `factory(config, store, parallel)` returns a `torchgt.training.system.System`.

    Raises ValueError if another factory holds the name; registering the same one again is harmless.
    """
    holder = _factories.get(name)
    if holder is not None and (holder.__module__, holder.__qualname__) != (factory.__module__, factory.__qualname__):
        raise ValueError(f"system {name!r} is registered already, by {holder.__module__}")
    _factories[name] = factory


def system_factory(name: str) -> SystemFactory:
    """The factory of `name`; ConfigError with the nearest match if there is none."""
    importlib.import_module("torchgt.training.system")  # registers `torchgt` itself
    if name not in _factories:
        raise ConfigError(unknown("system", name, _factories) + "; more come with --plugin MODULE")
    return _factories[name]


def system_names() -> list[str]:
    importlib.import_module("torchgt.training.system")
    return sorted(_factories)


def load_plugins(modules: Iterable[str]) -> list[Any]:
    """Import modules that register systems; ConfigError names one that cannot be found."""
    loaded = []
    for module in modules:
        try:
            loaded.append(importlib.import_module(module))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the plug-in is there, something that it needs is not
            raise ConfigError(f"plugins: no module named {module!r} (looked up from the current folder)") from None
    return loaded
