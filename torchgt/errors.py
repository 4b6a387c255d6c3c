"""Errors that a user can cause. Each carries one line: what was given, and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """An invalid configuration. The command line prints its one line and exits with 2."""


class RefusedError(RuntimeError):
    """A valid configuration that cannot run here (a missing device, a kernel that refuses). Recorded as `refused`."""


def unknown(kind: str, found: object, allowed: Iterable[str]) -> str:
    """One line for an unknown name: the value found, the nearest match if there is one, and all that is allowed."""
    names = sorted(str(name) for name in allowed)
    near = difflib.get_close_matches(str(found), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {kind} {found!r}{hint}; allowed: {', '.join(names)}"


class BusyError(RuntimeError):
    """Another process trains in the same run folder."""
