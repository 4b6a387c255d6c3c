"""The command `torchgt`. Exit codes: 0 done, 1 failed, 2 invalid input (one line, nothing written), 130 interrupted."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from torchgt._version import __version__
from torchgt.errors import ConfigError, RefusedError


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    sys.path.insert(0, os.getcwd())  # plug-ins are modules of the checkout
    try:
        return arguments.run(arguments)
    except (ConfigError, RefusedError) as error:
        print(f"torchgt: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        if type(error).__name__ != "StoreError":  # the class itself would cost an import of torch
            raise
        print(f"torchgt: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchgt", description="Train graph transformers on long node sequences.")
    parser.add_argument("--version", action="version", version=f"torchgt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="train|bench|info")

    train = commands.add_parser("train", help="train one system on one store and write its record")
    train.add_argument("--config", type=Path, required=True, help="YAML file with the keys of RunConfig")
    train.add_argument("--out", type=Path, required=True, help="where the record (JSON) goes")
    train.add_argument("--run-dir", type=Path, help="checkpoints and weights (default: beside the record, *.run)")
    train.add_argument("--plugin", action="append", default=[], help="module that registers systems; repeatable")
    train.add_argument("--no-resume", action="store_true", help="start anew, whatever checkpoints there are")
    train.set_defaults(run=_train)

    bench = commands.add_parser("bench", help="measure")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="steps|attention")
    steps = kinds.add_parser("steps", help="step time and memory of one system against sequence length")
    steps.add_argument("--config", type=Path, required=True, help="YAML file with the keys of BenchConfig")
    steps.add_argument("--out", type=Path, required=True, help="where the rows (JSON) go")
    steps.add_argument("--plugin", action="append", default=[], help="module that registers systems; repeatable")
    steps.set_defaults(run=_bench_steps)

    attention = kinds.add_parser("attention", help="attention implementations side by side, verified, then timed")
    attention.add_argument("--config", type=Path, help="YAML file with the keys of AttentionBenchConfig; options add")
    attention.add_argument("--store", help="store whose graph makes the pattern")
    attention.add_argument("--synthetic", metavar="NODES:PAIRS", help="a made-up graph of this size instead")
    attention.add_argument("--length", action="append", help='node tokens, or "all"; repeatable')
    attention.add_argument("--shape", action="append", metavar="HEADSxDIM", help="for instance 8x8; repeatable")
    attention.add_argument("--impl", action="append", help="implementation or module:function; repeatable")
    attention.add_argument("--bias", help="none | type | pair | both")
    attention.add_argument("--precision", help="fp32 | bf16 | fp64")
    attention.add_argument("--dropout", type=float)
    attention.add_argument("--num-global", type=int)
    attention.add_argument("--threads", type=int)
    attention.add_argument("--repeats", type=int)
    attention.add_argument("--memory-gb", type=float, help="memory of a trial, 10^9 bytes")
    attention.add_argument("--out", type=Path, help="where the rows (JSON) go; the summary goes to stderr")
    attention.set_defaults(run=_bench_attention)

    info = commands.add_parser("info", help="describe a store")
    info.add_argument("store", type=Path)
    info.set_defaults(run=_info)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    from torchgt.training.config import RunConfig
    from torchgt.training.supervisor import supervise

    config = RunConfig.from_yaml(arguments.config)
    config.plugins = [*config.plugins, *(p for p in arguments.plugin if p not in config.plugins)]
    run_dir = arguments.run_dir or arguments.out.with_suffix(".run")
    return supervise(arguments.config, config, arguments.out, run_dir, resume=not arguments.no_resume)


def _bench_steps(arguments: argparse.Namespace) -> int:
    from torchgt.bench.steps import BenchConfig, bench_steps
    from torchgt.files import write_json_atomic
    from torchgt.training.config import load_yaml

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    config = load_yaml(BenchConfig, arguments.config)
    config.plugins = [*config.plugins, *(p for p in arguments.plugin if p not in config.plugins)]
    write_json_atomic(arguments.out, bench_steps(config))
    return 0


def _bench_attention(arguments: argparse.Namespace) -> int:
    from torchgt.bench.attention import AttentionBenchConfig, bench_attention
    from torchgt.files import write_json_atomic
    from torchgt.training.config import build, read_yaml

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    values = read_yaml(arguments.config) if arguments.config else {}
    options = {"impls": arguments.impl, "lengths": arguments.length, "shapes": arguments.shape}
    options |= {key: getattr(arguments, key) for key in ("store", "bias", "precision", "dropout", "num_global")}
    options |= {key: getattr(arguments, key) for key in ("threads", "repeats", "memory_gb")}
    if arguments.synthetic is not None:
        options["synthetic"] = dict(
            zip(("nodes", "pairs"), _numbers("--synthetic", arguments.synthetic, ":"), strict=True)
        )
    if arguments.shape:
        options["shapes"] = [_numbers("--shape", shape, "x") for shape in arguments.shape]
    if arguments.length:
        options["lengths"] = [int(n) if n.isdigit() else n for n in arguments.length]
    values |= {key: value for key, value in options.items() if value is not None}
    result = bench_attention(build(AttentionBenchConfig, values))
    if arguments.out:
        write_json_atomic(arguments.out, result)
    return 0


def _numbers(option: str, text: str, separator: str) -> list[int]:
    """Two whole numbers with a separator between them."""
    parts = text.replace(",", "").split(separator)
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise ConfigError(f"{option}: {text!r}; allowed: two whole numbers with {separator!r} between them")
    return [int(part) for part in parts]


def _info(arguments: argparse.Namespace) -> int:
    from torchgt.data.store import GraphStore

    store = GraphStore.open(arguments.store)
    meta, graph = store.meta, store.graph
    degrees = graph.degrees()
    rows = {
        "name": meta["name"],
        "task": f"{meta['task']}, {meta['target']}, metric {meta['metric']}",
        "nodes": f"{graph.num_nodes:,}",
        "edges": f"{graph.num_edges:,} ({'directed' if meta['directed'] else 'symmetric'})",
        "degree": f"largest {int(degrees.max()) if len(degrees) else 0:,}, isolated {int((degrees == 0).sum()):,}",
        "features": str(store.x.shape[1]),
        "outputs": str(store.num_outputs),
        "splits": f"{len(store.splits)} ({meta['split_kind']}): "
        + ", ".join(f"{name} {len(nodes):,}" for name, nodes in store.splits[0].items()),
        "sha256": store.digest,
    }
    for key, value in rows.items():
        print(f"{key:9} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
