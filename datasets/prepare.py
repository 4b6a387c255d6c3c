"""`python -m datasets.prepare NAME --out DIR`: turn a data source into a store that `torchgt train` reads.

Exit codes: 0 done, 2 something given does not fit (one line says what), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from torchgt.data.store import GraphStore, StoreError
from torchgt.errors import unknown

# Name -> module that defines `prepare(out, *, nodes, seed, from_store, overwrite, log)`.
SOURCES = {"wordnet": "datasets.wordnet"}


def main(argv: list[str] | None = None) -> int:
    start = time.perf_counter()

    def log(line: str) -> None:
        print(f"[{time.perf_counter() - start:6.1f} s] {line}", file=sys.stderr, flush=True)

    args = _parser().parse_args(argv)
    try:
        module, options = _request(args)
        store = _call(module, Path(args.out), {**options, "overwrite": args.force, "log": log})
    except (ValueError, OSError) as error:  # StoreError, what the library raises for arguments, a full or closed disk
        print(f"prepare: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    log(f"{store!r} at {args.out}, digest {store.digest[:16]}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m datasets.prepare", description="Prepare a data set as a store.")
    parser.add_argument("name", nargs="?", help=f"data set: {', '.join(SOURCES)}")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the store, made anew")
    parser.add_argument("--nodes", type=int, metavar="N", help="cut a connected part with N nodes")
    parser.add_argument("--seed", type=int, help="of the shuffle of ids, the split and the part (default 0)")
    parser.add_argument("--from-store", metavar="DIR", help="with --nodes: cut from this whole store")
    parser.add_argument("--module", metavar="MODULE", help="a module of yours that defines prepare(out, **options)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="with --module: an option, as YAML"
    )
    parser.add_argument("--force", action="store_true", help="replace a store that is there")
    return parser


def _request(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """(module, its options) that the command line asks for."""
    if (args.name is None) == (args.module is None):
        raise StoreError(f"name {args.name!r}, --module {args.module!r}; allowed: one of both; names: {_names()}")
    if args.seed is not None and args.seed < 0:
        raise StoreError(f"--seed is {args.seed}; allowed: 0 or more")
    if args.module is not None:
        for flag in ("nodes", "from_store"):
            if getattr(args, flag) is not None:
                raise StoreError(f"--{flag.replace('_', '-')} with --module; allowed: --option KEY=VALUE")
        options = dict(map(_option, args.option))
        # The seed is passed on only if it was asked for: a module need not have one.
        return args.module, options | ({} if args.seed is None else {"seed": args.seed})
    if args.option:
        raise StoreError(f"--option {args.option[0]} with data set {args.name!r}; allowed: with --module")
    if args.name not in SOURCES:
        raise StoreError(unknown("data set", args.name, SOURCES))
    return SOURCES[args.name], {"nodes": args.nodes, "seed": args.seed or 0, "from_store": args.from_store}


def _names() -> str:
    return ", ".join(SOURCES)


def _option(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key.isidentifier():
        raise StoreError(f"--option {text!r}; allowed: KEY=VALUE")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise StoreError(f"--option {text!r}; allowed: a YAML value after '='") from None


def _call(name: str, out: Path, given: dict[str, Any]) -> GraphStore:
    """Call the module's `prepare` with the options that it takes, and open what it wrote."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise StoreError(f"--module {name!r}: no module {error.name!r}; allowed: what Python can import here") from None
    function = getattr(module, "prepare", None)
    if not callable(function):
        raise StoreError(f"--module {name!r}: defines no prepare(out, **options)")
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        given = {key: value for key, value in given.items() if key in parameters or key not in ("overwrite", "log")}
        allowed = [key for key in list(parameters)[1:] if key not in ("overwrite", "log")]
        for key in given:
            if key not in parameters:
                raise StoreError(unknown(f"option of {name}", key, allowed or ["(none)"]))
        for key, parameter in list(parameters.items())[1:]:
            if parameter.default is parameter.empty and key not in given:
                raise StoreError(f"option {key!r} of {name} is missing: --option {key}=VALUE")
    function(out, **given)
    return GraphStore.open(out)


if __name__ == "__main__":
    sys.exit(main())
