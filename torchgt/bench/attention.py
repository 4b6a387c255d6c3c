"""Attention implementations side by side in one run: verified, then timed in turns, with the floor beside each time.

For every sequence and shape, each implementation is first tried in a child under the memory budget (its peak beyond
inputs, outputs and gradients is the memory reported), then verified against the float64 oracle, and only then timed:
implementations take turns, so that a disturbance of the machine hits all of them, and medians with quartiles are kept.
Forward and backward are timed apart.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from torchgt._version import RESULTS_VERSION
from torchgt.attention import IMPLEMENTATIONS, graph_attention
from torchgt.bench.floors import Rates, attention_work, measure_rates
from torchgt.bench.machine import code_provenance, machine_class
from torchgt.bench.memory import limit_memory, peak_resident_bytes, proc_status_bytes
from torchgt.bench.timer import quartiles
from torchgt.bench.verify import Inputs, run, take_sample, verify
from torchgt.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

FORMAT = 1
MIN_REPEATS = 3
BIASES = ("none", "type", "pair", "both")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
PHASES = ("forward", "backward", "total")


@dataclass(kw_only=True)
class SyntheticConfig:
    """A graph that is made up: log-normal degrees, ids in cluster order."""

    nodes: int
    """N"""
    pairs: int
    """Directed edges, self-loops not counted."""
    local: float = 0.9
    """Share of the edges that stay near their node."""

    def __post_init__(self) -> None:
        if self.nodes < 2 or self.pairs < 0:
            raise ConfigError(f"synthetic: nodes {self.nodes}, pairs {self.pairs}; allowed: nodes of at least 2")


@dataclass(kw_only=True)
class AttentionBenchConfig:
    """Implementations of attention over several sequences and shapes."""

    impls: list[str] = field(default_factory=lambda: ["cpu", "scatter"])
    """Names of `graph_attention`'s implementations, or module:function for a callable of the same arguments."""
    store: str | None = None
    """A GraphStore whose graph makes the pattern; or `synthetic`."""
    synthetic: SyntheticConfig | None = None
    lengths: list[Any] = field(default_factory=lambda: ["all"])
    """Node tokens of each sequence, a connected part of the store; "all" is the store's own size."""
    shapes: list[Any] = field(default_factory=lambda: [[8, 8]])
    """[heads, head dimension] of each measurement."""
    bias: str = "none"
    """none | type | pair | both"""
    dropout: float = 0.0
    self_loops: bool = True
    num_global: int = 0
    cluster_tokens: int = 1024
    """Size of the clusters whose order the tokens get; a synthetic graph is in order already."""
    precision: str = "fp32"
    threads: int = 0
    seed: int = 0
    repeats: int = 20
    warmup: int = 2
    measure_s: float = 20.0
    """An implementation is repeated as often as fits into this time, but at least 3 times."""
    memory_gb: float | None = None
    """Private memory of a trial, inputs included, 10^9 bytes."""
    results_version: int = RESULTS_VERSION

    def __post_init__(self) -> None:
        if (self.store is None) == (self.synthetic is None):
            raise ConfigError("store, synthetic: allowed: exactly one of them")
        for name in self.impls:
            if ":" not in name and name not in IMPLEMENTATIONS:
                raise ConfigError(f"impls: {unknown('implementation', name, IMPLEMENTATIONS)}, or module:function")
        if not self.impls or len(set(self.impls)) < len(self.impls):
            raise ConfigError(f"impls: {self.impls}; allowed: at least one, each once")
        for shape in self.shapes:
            if not isinstance(shape, list) or len(shape) != 2 or any(type(n) is not int or n < 1 for n in shape):
                raise ConfigError(f"shapes: {shape!r}; allowed: [heads, head dimension], both at least 1")
        for length in self.lengths:
            if length != "all" and (type(length) is not int or length < 2):
                raise ConfigError(f'lengths: {length!r}; allowed: whole numbers of at least 2, or "all"')
        if not self.lengths or not self.shapes:
            raise ConfigError("lengths, shapes: empty; allowed: at least one of each")
        for key, value, allowed in (("bias", self.bias, BIASES), ("precision", self.precision, DTYPES)):
            if value not in allowed:
                raise ConfigError(f"{key}: {unknown('value', value, allowed)}")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout: {self.dropout}; allowed: [0, 1)")
        if self.repeats < MIN_REPEATS:
            raise ConfigError(f"repeats: {self.repeats}; allowed: at least {MIN_REPEATS}")


def bench_attention(config: AttentionBenchConfig) -> dict[str, Any]:
    """Measure every implementation on every sequence and shape.

    Returns:
        {"format", "kind": "bench-attention", "rows"}, a row for each implementation, sequence, shape and phase
        ("forward", "backward", "total"): median, q25, q75 (seconds), n, floor_s, memory_bytes (beyond inputs, output
        and gradients), errors (root mean square against float64, of it and of gather/scatter), status.

    Raises:
        ConfigError, StoreError: invalid input.
        ArithmeticError: an implementation is wrong; nothing is timed then.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    for name in config.impls:
        _resolve(name)
    context = multiprocessing.get_context("forkserver")
    modules = {name.partition(":")[0] for name in config.impls if ":" in name}
    context.set_forkserver_preload(["torchgt.bench.attention", "torchgt.attention.impl.cpu", *sorted(modules)])
    rates = measure_rates(torch.device("cpu"), DTYPES[config.precision])
    logger.info(
        "copy %.1f GB/s (read and written), product %.0f GFLOP/s", rates.bytes_per_s / 1e9, rates.flop_per_s / 1e9
    )
    rows: list[dict[str, Any]] = []
    for length in config.lengths:
        pattern = make_pattern(config, length)
        for heads, dim in config.shapes:
            rows += _measure(context, config, pattern, length, heads, dim, rates)
    return {"format": FORMAT, "kind": "bench-attention", "config": dataclasses.asdict(config), "rows": rows}


def make_pattern(config: AttentionBenchConfig, length: int | str) -> Any:
    """The pattern of one sequence, tokens in cluster order. ConfigError for a length that the graph does not have."""
    from torchgt.data.store import GraphStore
    from torchgt.data.synthetic import synthetic_graph
    from torchgt.graph import connected_subset
    from torchgt.partition import partition_graph
    from torchgt.pattern import AttentionPattern

    if config.synthetic is not None:
        whole, pairs = config.synthetic.nodes, config.synthetic.pairs
        nodes = whole if length == "all" else int(length)
        if nodes > whole:
            raise ConfigError(f"lengths: {nodes}; the synthetic graph has {whole} nodes")
        graph = synthetic_graph(nodes, pairs * nodes // whole, config.seed, config.synthetic.local)
    else:
        store = GraphStore.open(config.store)
        graph = store.graph
        if length != "all":
            if length > graph.num_nodes:
                raise ConfigError(f"lengths: {length}; the store {config.store} has {graph.num_nodes} nodes")
            graph = graph.subgraph(connected_subset(graph, int(length), config.seed))
        parts = max(1, -(-graph.num_nodes // config.cluster_tokens))
        graph = graph.permute(partition_graph(graph, parts, config.seed).order)
    return AttentionPattern.from_graph(graph, self_loops=config.self_loops, num_global=config.num_global)


def make_inputs(config: AttentionBenchConfig, pattern: Any, heads: int, dim: int) -> Inputs:
    """Normal random operands of the configured kind."""
    dtype = DTYPES[config.precision]
    generator = torch.Generator().manual_seed(config.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    shape = (pattern.num_tokens, heads, dim)
    query, key, value = (normal(*shape).requires_grad_() for _ in range(3))
    pair = normal(pattern.num_pairs, heads).requires_grad_() if config.bias in ("pair", "both") else None
    kind = normal(pattern.num_types, heads).requires_grad_() if config.bias in ("type", "both") else None
    seed = torch.tensor(config.seed) if config.dropout else None
    return Inputs(query, key, value, normal(*shape), pair, kind, config.dropout, seed)


def _resolve(name: str) -> Callable[..., Tensor]:
    """The callable of an implementation. ConfigError if a module or function does not exist."""
    if ":" not in name:

        def attention(*arguments: Any, **keywords: Any) -> Tensor:
            return graph_attention(*arguments, impl=name, **keywords)

        return attention
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"impls: {name!r} cannot be imported ({error})") from None


# One sequence and shape -----------------------------------------------------------------------------------------------


def _measure(
    context: Any, config: AttentionBenchConfig, pattern: Any, length: int | str, heads: int, dim: int, rates: Rates
) -> list[dict[str, Any]]:
    trials = {name: _try(context, config, length, heads, dim, name) for name in config.impls}
    able = [name for name in config.impls if trials[name]["status"] == "ok"]
    inputs = make_inputs(config, pattern, heads, dim)
    functions = {name: _resolve(name) for name in able}
    sample = take_sample(pattern, config.seed)
    checked = {}
    for name in able:
        try:
            checked[name] = verify(run(functions[name], inputs, pattern), inputs, pattern, sample)
        except ArithmeticError as error:
            raise ArithmeticError(f"{name}, {heads} heads x {dim}: {error}") from None
    times = _time(config, functions, inputs, pattern, {name: trials[name]["seconds"] for name in able})
    work = attention_work(
        pattern.num_tokens,
        pattern.num_pairs_computed,
        heads,
        dim,
        inputs.query.itemsize,
        index_itemsize=pattern.col.itemsize,
        type_bias=inputs.type_bias is not None,
        pair_bias=inputs.pair_bias is not None,
    )
    shared = {
        "num_tokens": pattern.num_tokens,
        "pairs": pattern.num_pairs_computed,
        "heads": heads,
        "head_dim": dim,
        "precision": config.precision,
        "bias": config.bias,
        "dropout": config.dropout,
        "threads": torch.get_num_threads(),
        "copy_bytes_per_s": rates.bytes_per_s,
        "flop_per_s": rates.flop_per_s,
        "machine_class": machine_class(torch.device("cpu")),
        "provenance": code_provenance(AttentionBenchConfig),
    }
    rows = []
    for name in config.impls:
        for phase in PHASES:
            row = shared | {"impl": name, "phase": phase, "status": trials[name]["status"]}
            row |= {"error": trials[name]["error"], "memory_bytes": trials[name].get("memory_bytes")}
            row |= {"floor_s": work[phase].floor_s(rates), "bytes": work[phase].bytes, "flop": work[phase].flop}
            if name in times:
                row |= {**times[name][phase], "errors": {key: list(pair) for key, pair in checked[name].items()}}
            rows.append(row)
    _report(rows)
    return rows


def _time(
    config: AttentionBenchConfig,
    functions: dict[str, Callable[..., Tensor]],
    inputs: Inputs,
    pattern: Any,
    estimates: dict[str, float],
) -> dict[str, dict[str, Any]]:
    """Quartiles by implementation and phase; the implementations take turns."""
    repeats = {
        name: max(MIN_REPEATS, min(config.repeats, int(config.measure_s / max(estimates[name], 1e-9))))
        for name in functions
    }
    seconds: dict[str, dict[str, list[float]]] = {name: {phase: [] for phase in PHASES} for name in functions}
    tensors = list(inputs.differentiable().values())
    for turn in range(-config.warmup, max(repeats.values(), default=0)):
        for name, attention in functions.items():
            if turn >= repeats[name] or (turn < 0 and estimates[name] * config.warmup > config.measure_s):
                continue
            start = time.perf_counter()
            out = attention(inputs.query, inputs.key, inputs.value, pattern, **inputs.keywords())
            middle = time.perf_counter()
            grads = torch.autograd.grad(out, tensors, inputs.grad_out)
            end = time.perf_counter()
            del out, grads  # outside the time, like whatever comes after a layer
            if turn >= 0:
                for phase, value in zip(PHASES, (middle - start, end - middle, end - start), strict=True):
                    seconds[name][phase].append(value)
    return {name: {phase: quartiles(values) for phase, values in kinds.items()} for name, kinds in seconds.items()}


def _report(rows: list[dict[str, Any]]) -> None:
    """One line an implementation: time, times the floor, ratio to the first implementation, extra memory."""
    total = {row["impl"]: row for row in rows if row["phase"] == "total"}
    first = next(iter(total.values()))
    logger.info(
        "%s tokens, %s pairs, %d heads x %d, %s, bias %s: floor %.1f ms",
        f"{first['num_tokens']:,}", f"{first['pairs']:,}", first["heads"], first["head_dim"], first["precision"],
        first["bias"], 1e3 * first["floor_s"],
    )  # fmt: skip
    for name, row in total.items():
        if "median" not in row:
            logger.info("  %-28s %s: %s", name, row["status"], row["error"])
            continue
        parts = {r["phase"]: r["median"] for r in rows if r["impl"] == name}
        ratio = row["median"] / first["median"] if "median" in first else float("nan")
        logger.info(
            "  %-28s %9.1f ms (%.1f forward + %.1f backward; quartiles %.1f-%.1f, n %d)  %5.1fx floor  %6.2fx %s  "
            "%.0f MB extra",
            name, 1e3 * row["median"], 1e3 * parts["forward"], 1e3 * parts["backward"], 1e3 * row["q25"],
            1e3 * row["q75"], row["n"], row["median"] / row["floor_s"], ratio, first["impl"],
            (row["memory_bytes"] or 0) / 1e6,
        )  # fmt: skip


# The trial in a child -------------------------------------------------------------------------------------------------


def _try(
    context: Any, config: AttentionBenchConfig, length: int | str, heads: int, dim: int, name: str
) -> dict[str, Any]:
    """One forward and backward in a child: {"status", "error", "memory_bytes", "seconds"}."""
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_trial, args=(config, length, heads, dim, name, sender), daemon=True)
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        child.join()
        return {"status": "oom" if config.memory_gb else "error", "error": f"the child died ({child.exitcode})"}
    finally:
        child.join()
        receiver.close()


def _trial(
    config: AttentionBenchConfig, length: int | str, heads: int, dim: int, name: str, sender: Connection
) -> None:
    from torchgt.training.worker import is_out_of_memory

    if config.threads:
        torch.set_num_threads(config.threads)
    try:
        if config.memory_gb:
            limit_memory(int(config.memory_gb * 1e9))
        pattern = make_pattern(config, length)
        inputs = make_inputs(config, pattern, heads, dim)
        attention = _resolve(name)
        # Loads kernels and libraries, and makes what an implementation keeps with the pattern (a layout, an index).
        run(attention, inputs, pattern)
        before = _reset_peak()
        start = time.perf_counter()
        results = run(attention, inputs, pattern)
        seconds = time.perf_counter() - start
        kept = sum(x.numel() * x.itemsize for x in results.values())
        extra = peak_resident_bytes() - before - kept
        sender.send({"status": "ok", "error": None, "memory_bytes": max(0, extra), "seconds": seconds})
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        oom = is_out_of_memory(error)
        refused = isinstance(error, (RuntimeError, ValueError, NotImplementedError)) and not oom
        sender.send({"status": "oom" if oom else "refused" if refused else "error", "error": line})


def _reset_peak() -> int:
    """Start the peak of this process's resident size anew; returns what is resident now, bytes."""
    with open("/proc/self/clear_refs", "w") as handle:
        handle.write("5")
    return proc_status_bytes("VmRSS") or 0


__all__ = ["AttentionBenchConfig", "SyntheticConfig", "bench_attention", "make_inputs", "make_pattern"]
