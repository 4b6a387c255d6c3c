"""Step time and peak memory of one system against sequence length.

One process times all lengths. Before a length is timed, a child tries it once under the memory and time budget: its
peak is the length's memory, and what ends it is recorded as the end of the system's range. Children are forked from a
clean server that has only done the imports, so they cost no import and their baseline is the imports alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import multiprocessing
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from torchgt._version import RESULTS_VERSION
from torchgt.bench.machine import code_provenance, machine_class
from torchgt.bench.memory import PeakMemory, limit_memory
from torchgt.bench.timer import StepTimer
from torchgt.data.store import GraphStore
from torchgt.errors import ConfigError
from torchgt.graph import Graph, connected_subset
from torchgt.models import Batch
from torchgt.parallel import SequenceParallel
from torchgt.schedule import InterleavedSchedule
from torchgt.training.config import BudgetConfig, EvaluationConfig, RunConfig, ScheduleConfig
from torchgt.training.record import RunRecord
from torchgt.training.registry import load_plugins, system_factory
from torchgt.training.seeds import derive_seed, seed_everything
from torchgt.training.system import System
from torchgt.training.trainer import train_step
from torchgt.training.worker import is_out_of_memory

logger = logging.getLogger(__name__)

FORMAT = 1
MIN_REPEATS = 3
PREPARE_S = 120.0  # least time that the preprocessing of a length may take, whatever the step's budget


@dataclass(kw_only=True)
class StepBudget:
    """What ends a system's range of lengths."""

    step_s: float = 60.0
    """Longest acceptable step, seconds."""
    measure_s: float = 10.0
    """A kind of step is repeated as often as fits into this time, but at least 3 times."""
    memory_bytes: int | None = None
    """Private memory on top of the imports, bytes; none: unlimited."""

    def __post_init__(self) -> None:
        for key in ("step_s", "measure_s", "memory_bytes"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ConfigError(f"budget.{key}: {value!r}; allowed: a positive number")


@dataclass(kw_only=True)
class BenchConfig:
    """One system and model over several lengths of one store."""

    system: str
    store: str
    lengths: list[Any]
    """Node tokens of each sequence; those beyond the store are left out, its own size may be given as "all"."""
    model: str = "graphormer-slim"
    seed: int = 0
    threads: int = 0
    precision: str = "fp32"
    device: str = "auto"
    repeats: int = 10
    warmup: int = 2
    amortise: list[Any] = field(default_factory=lambda: [5, 10, 50])
    """Values of dense_every for which the mean step is worked out from the measured sparse and dense steps."""
    dropout: float = 0.1
    input_dropout: float = 0.1
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    budget: StepBudget = field(default_factory=StepBudget)
    options: dict[str, Any] = field(default_factory=dict)
    plugins: list[str] = field(default_factory=list)
    results_version: int = RESULTS_VERSION

    def __post_init__(self) -> None:
        for key, values in (("lengths", self.lengths), ("amortise", self.amortise)):
            for value in values:
                if not (key == "lengths" and value == "all") and (type(value) is not int or value < 1):
                    raise ConfigError(f"{key}: {value!r}; allowed: whole numbers of at least 1")
        if not self.lengths:
            raise ConfigError("lengths: empty; allowed: at least one length")
        if self.repeats < MIN_REPEATS:
            raise ConfigError(f"repeats: {self.repeats}; allowed: at least {MIN_REPEATS}")

    def run_config(self) -> RunConfig:
        """The training configuration that a step is taken from."""
        return RunConfig(
            system=self.system,
            store=self.store,
            model=self.model,
            seed=self.seed,
            precision=self.precision,
            device=self.device,
            threads=self.threads,
            dropout=self.dropout,
            input_dropout=self.input_dropout,
            schedule=dataclasses.replace(self.schedule, dense_every=self.schedule.dense_every or 1),
            evaluation=EvaluationConfig(),
            budget=BudgetConfig(memory_bytes=self.budget.memory_bytes),
            options=self.options,
            plugins=self.plugins,
        )


@dataclass
class SubsetStore:
    """A connected part of a store, in memory; has what a System reads of a GraphStore."""

    name: str
    meta: dict[str, Any]
    graph: Graph
    x: Tensor
    y: Tensor
    splits: list[dict[str, Tensor]]
    digest: str
    num_outputs: int

    @classmethod
    def cut(cls, store: GraphStore, num_nodes: int, seed: int) -> SubsetStore:
        if num_nodes == store.graph.num_nodes:
            nodes = torch.arange(num_nodes)
        else:
            nodes = connected_subset(store.graph, num_nodes, seed)
        new_id = torch.full((store.graph.num_nodes,), -1, dtype=torch.int64)
        new_id[nodes] = torch.arange(len(nodes))
        splits = []
        for split in store.splits:
            parts = {name: new_id[members] for name, members in split.items()}
            splits.append({name: ids[ids >= 0] for name, ids in parts.items()})
        graph = store.graph if num_nodes == store.graph.num_nodes else store.graph.subgraph(nodes)
        return cls(
            store.name, store.meta, graph, store.x[nodes], store.y[nodes], splits, store.digest, store.num_outputs
        )


def bench_steps(config: BenchConfig) -> dict[str, Any]:
    """Measure every length until a budget ends the system.

    Returns:
        {"format", "kind": "bench-steps", "rows"}: a row is a record (docs/design.md) of one length. The length that
        met a budget is the last row, its status says which one.

    Raises:
        ConfigError, StoreError: invalid input.
    """
    load_plugins(config.plugins)
    factory = system_factory(config.system)
    store = GraphStore.open(config.store)
    store.validate()
    if config.threads:
        torch.set_num_threads(config.threads)
    for module in getattr(factory, "imports", ()):
        importlib.import_module(module)
    context = _clean_server(config, getattr(factory, "imports", ()))
    rows, slowest = [], []
    for length in _lengths(config, store.graph.num_nodes):
        trial = _predicted_timeout(config, length, slowest) or _try_length(context, config, length)
        slowest.append((length, max(trial["step_s"].values(), default=0.0)))
        logger.info("%s %s %d tokens: %s", config.system, config.model, length, trial["status"])
        if trial["status"] != "ok":
            rows.append(_failed_row(config, store, length, trial).to_dict())
            break
        rows.append(_time_length(config, store, length, trial).to_dict())
    return {"format": FORMAT, "kind": "bench-steps", "rows": rows}


def _predicted_timeout(config: BenchConfig, length: int, slowest: list[tuple[int, float]]) -> dict[str, Any] | None:
    """A timeout without trying, where the growth over the last two lengths puts the step far beyond its budget.

    Far is twice the budget: waiting for the whole budget would only confirm what is certain already.
    """
    if len(slowest) < 2 or min(seconds for _, seconds in slowest[-2:]) <= 0:
        return None
    (n1, s1), (n2, s2) = slowest[-2:]
    predicted = s2 * (length / n2) ** max(0.0, math.log(s2 / s1) / math.log(n2 / n1))
    if s2 < 1.0 or predicted <= 2 * config.budget.step_s:  # short steps are too noisy to extrapolate from
        return None
    error = f"not tried: a step of about {predicted:.0f} s is predicted, over the budget of {config.budget.step_s:g} s"
    return {"status": "timeout", "error": error, "step_s": {}}


def _lengths(config: BenchConfig, num_nodes: int) -> list[int]:
    lengths = {num_nodes if length == "all" else length for length in config.lengths}
    usable = sorted(length for length in lengths if length <= num_nodes)
    if not usable:
        raise ConfigError(f"lengths: {config.lengths}; the store {config.store} has {num_nodes} nodes")
    return usable


# One length -----------------------------------------------------------------------------------------------------------


class Bench:
    """A system set up on a sequence of some length, ready to take steps."""

    def __init__(self, config: BenchConfig, store: GraphStore, length: int) -> None:
        run = config.run_config()
        seed_everything(derive_seed(config.seed, "initialisation"))
        subset = SubsetStore.cut(store, length, config.seed)
        self.system: System = system_factory(config.system)(run, subset, SequenceParallel(None))
        self.system.prepare()
        self.system.lay_out()
        self.model = self.system.build_model()
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=run.optim.lr)

    def kinds(self) -> list[str]:
        return ["sparse", "dense"] if hasattr(self.system, "schedule") else [self.system.kind(0)]

    def batch(self, kind: str, step: int) -> Batch:
        return self.system.train_batch(self.system.sampler.whole(), kind, step)

    def step(self, batch: Batch) -> None:
        train_step(self.system, self.model, self.optimizer, batch)


def _time_length(config: BenchConfig, store: GraphStore, length: int, trial: dict[str, Any]) -> RunRecord:
    start = time.perf_counter()
    bench = Bench(config, store, length)
    prepare_s = time.perf_counter() - start
    system = bench.system
    timer = StepTimer(system.device, warmup=0)
    for kind in bench.kinds():
        estimate = trial["step_s"][kind]
        # Where a few steps fill the time to measure in, the trial's step, warm-up and all, counts as one of them.
        long = estimate * (config.warmup + MIN_REPEATS) > config.budget.measure_s
        if long:
            timer.seconds[kind] = [estimate]
        for index in range(0 if long else config.warmup):
            bench.step(bench.batch(kind, index))
        affordable = int(config.budget.measure_s / max(estimate, 1e-9))
        repeats = max(MIN_REPEATS, min(config.repeats, affordable)) - int(long)
        for index in range(repeats):
            batch = bench.batch(kind, index)
            with timer.step(kind):
                bench.step(batch)
    steps = timer.summary()
    median = {kind: values["median"] for kind, values in steps.items()}
    time_s: dict[str, Any] = dict(steps)
    if {"sparse", "dense"} <= set(median):
        time_s["amortised"] = {
            str(k): InterleavedSchedule(dense_every=k).amortised(median["sparse"], median["dense"])
            for k in config.amortise
        }
    facts = system.pattern_facts()
    main = median.get("sparse", median.get("dense"))
    row = _row(config, store, length, "ok", None)
    row.num_params = sum(p.numel() for p in bench.model.parameters())
    row.device = system.device.type
    row.machine_class = machine_class(system.device)
    row.provenance = code_provenance(type(system))
    row.time = {"preprocess_s": prepare_s, "preprocess": system.seconds, "compile_s": 0.0, "step_s": time_s}
    row.memory = trial["memory"]
    row.pattern = {**facts, "edges_kept": 1.0}
    row.throughput = {"tokens_per_s": length / main, "pairs_per_s": facts.get("pairs", 0) / main}
    return row


def _row(config: BenchConfig, store: GraphStore, length: int, status: str, error: str | None) -> RunRecord:
    return RunRecord(
        status=status,
        error=error,
        system=config.system,
        model=config.model,
        dataset=store.name,
        store_sha256=store.digest,
        seed=config.seed,
        config=dataclasses.asdict(config),
        precision=config.precision,
        threads=torch.get_num_threads(),
        seq_len=length,
        budget={"seconds": config.budget.step_s, "memory_bytes": config.budget.memory_bytes},
    )


def _failed_row(config: BenchConfig, store: GraphStore, length: int, trial: dict[str, Any]) -> RunRecord:
    row = _row(config, store, length, trial["status"], trial["error"])
    row.memory = trial.get("memory", {})
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    row.device, row.machine_class = device.type, machine_class(device)
    return row


# The trial in a child -------------------------------------------------------------------------------------------------


def _clean_server(config: BenchConfig, imports: tuple[str, ...]) -> Any:
    """A forkserver with the imports done. Not a fork of this process: its OpenMP threads would not survive one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchgt.bench.steps", "torchgt.attention.impl.cpu", *config.plugins, *imports])
    return context


def _try_length(context: Any, config: BenchConfig, length: int) -> dict[str, Any]:
    """Run each kind of step once in a child under the budgets.

    Returns:
        {"status", "error", "memory", "step_s": {kind: seconds}}.
    """
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_trial, args=(config, length, sender), daemon=True)
    child.start()
    sender.close()
    state: dict[str, Any] = {"status": "ok", "error": None, "step_s": {}}
    try:
        limit = max(PREPARE_S, config.budget.step_s)
        stage = "preprocessing"
        while True:
            if not receiver.poll(limit):
                state |= {"status": "timeout", "error": f"{stage} took longer than the budget of {limit:g} s"}
                break
            message = receiver.recv()
            if "done" in message:
                state |= message["done"]
                break
            stage, limit = message["stage"], config.budget.step_s
            state["step_s"] |= message.get("step_s", {})
    except EOFError:
        child.join()
        state |= _death(child.exitcode, config)
    finally:
        if child.is_alive():
            child.kill()
        child.join()
        receiver.close()
    slow = {kind: s for kind, s in state["step_s"].items() if s > config.budget.step_s}
    if state["status"] == "ok" and slow:
        kind, seconds = next(iter(slow.items()))
        state |= {"status": "timeout", "error": f"a {kind} step took {seconds:.1f} s, over {config.budget.step_s:g} s"}
    return state


def _death(code: int | None, config: BenchConfig) -> dict[str, Any]:
    if config.budget.memory_bytes and code not in (0, 1):
        gib = config.budget.memory_bytes / 2**30
        return {"status": "oom", "error": f"died (exit code {code}) under the memory budget of {gib:g} GiB"}
    return {"status": "error", "error": f"the child died with exit code {code}"}


def _trial(config: BenchConfig, length: int, sender: Connection) -> None:
    try:
        sender.send({"done": _run_trial(config, length, sender)})
    except Exception as error:
        status = "oom" if is_out_of_memory(error) else "refused" if type(error).__name__ == "RefusedError" else "error"
        if status == "error":
            traceback.print_exc()
        line = (str(error).splitlines() or [type(error).__name__])[0]
        sender.send({"done": {"status": status, "error": line}})


def _run_trial(config: BenchConfig, length: int, sender: Connection) -> dict[str, Any]:
    load_plugins(config.plugins)
    if config.threads:
        torch.set_num_threads(config.threads)
    memory = PeakMemory()
    if config.budget.memory_bytes:
        limit_memory(config.budget.memory_bytes)
    bench = Bench(config, GraphStore.open(config.store), length)
    sender.send({"stage": "the first step"})
    timer = StepTimer(bench.system.device, warmup=0)
    for kind in bench.kinds():
        batch = bench.batch(kind, 0)
        with timer.step(kind):
            bench.step(batch)
        sender.send({"stage": "a step", "step_s": {kind: timer.seconds[kind][-1]}})
    return {"status": "ok", "error": None, "memory": memory.report(bench.system.device)}


__all__ = ["BenchConfig", "StepBudget", "SubsetStore", "bench_steps"]
