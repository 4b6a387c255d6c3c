"""The training loop: `train(config)` trains one system on one store and returns its record."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from tqdm import tqdm

from torchgt.bench.machine import code_provenance, machine_class
from torchgt.bench.memory import PeakMemory
from torchgt.bench.timer import StepTimer
from torchgt.data.store import GraphStore
from torchgt.errors import BusyError
from torchgt.files import write_json_atomic
from torchgt.models import Batch
from torchgt.parallel import SequenceParallel, init_distributed
from torchgt.training.checkpoint import CheckpointStore, restore_rng
from torchgt.training.config import RunConfig
from torchgt.training.metrics import better, evaluate, loss_sum, majority_share
from torchgt.training.record import RunRecord
from torchgt.training.registry import load_plugins, system_factory
from torchgt.training.seeds import derive_seed, seed_everything
from torchgt.training.system import System

logger = logging.getLogger(__name__)


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived; the newest checkpoint is usable."""


def train(config: RunConfig, run_dir: str | Path | None = None, *, resume: bool = True) -> RunRecord:
    """Train `config.system` on `config.store`.

    Args:
        config: what to run.
        run_dir: folder of checkpoints and of the trained weights (`model.safetensors`); None keeps nothing.
        resume: go on from the newest whole checkpoint of the same configuration and store in `run_dir`.

    Returns:
        The record, with status "ok"; on other ranks than 0 it lacks nothing but is not meant to be written.

    Raises:
        ConfigError, StoreError: the configuration or the store is invalid; nothing was written.
        RefusedError: a valid configuration that cannot run here.
        Interrupted: SIGINT or SIGTERM arrived; the same call resumes.
        BusyError: another process trains in `run_dir`.
    """
    group = init_distributed()
    trainer = Trainer(config, SequenceParallel(group, strategy=config.parallel.strategy), run_dir)
    with _signals_raise():
        try:
            return trainer.run(resume=resume)
        finally:
            if trainer.lock is not None:
                trainer.lock.release()


class Trainer:
    """State of one run. The loop is `run`; everything else serves it."""

    def __init__(self, config: RunConfig, parallel: SequenceParallel, run_dir: str | Path | None) -> None:
        self.config, self.parallel = config, parallel
        if config.threads:
            torch.set_num_threads(config.threads)
        load_plugins(config.plugins)
        factory = system_factory(config.system)
        for module in getattr(factory, "imports", ()):
            importlib.import_module(module)
        self.memory = PeakMemory()
        self.started = time.perf_counter()
        seed_everything(derive_seed(config.seed, "initialisation"))
        self.store = GraphStore.open(config.store)
        self.store.validate()
        self.system: System = factory(config, self.store, parallel)
        self.checkpoints = CheckpointStore(run_dir) if run_dir is not None else None
        self.lock: FileLock | None = None
        self.timer = StepTimer(self.system.device)
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {}
        self.step = 0
        self.kind_counts = {"sparse": 0, "dense": 0}
        self.epoch_seconds: list[float] = []
        self.eval_seconds: list[float] = []
        self.since_better = 0
        self.traffic: dict[str, list[int]] = {}  # category -> [bytes, calls], of training steps only
        self.wall_before = 0.0  # seconds of the interrupted runs that this one resumes

    # The loop -----------------------------------------------------------------------------------------------------

    def run(self, *, resume: bool = True) -> RunRecord:
        config, system = self.config, self.system
        system.prepare()
        system.lay_out()
        self.model = system.build_model()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.optim.lr, weight_decay=config.optim.weight_decay
        )
        self._lock_run_folder()
        first_epoch = self._resume() if resume else 0
        self.edges_kept = system.edges_kept(system.sampler.epoch(0))
        self.preprocess_s = time.perf_counter() - self.started
        self._write_partial()
        if self.checkpoints and self.parallel.rank == 0 and first_epoch == 0:
            self._save(0)
        with self._progress(first_epoch) as progress:
            for epoch in range(first_epoch, config.epochs):
                start = time.perf_counter()
                loss = self._train_epoch(epoch)
                self.epoch_seconds.append(time.perf_counter() - start)
                entry = {"epoch": epoch + 1, "loss": loss, "seconds": self.epoch_seconds[-1], "beta": None}
                last = epoch + 1 == config.epochs
                if last or (epoch + 1) % config.evaluation.every == 0:
                    entry |= self._evaluate(epoch + 1)
                entry["wall_s"] = self.wall_before + time.perf_counter() - self.started
                self.history.append(entry)
                stop = bool(config.optim.patience) and self.since_better >= config.optim.patience
                if self.checkpoints and self.parallel.rank == 0:
                    if last or stop or (epoch + 1) % config.checkpoint_every == 0:
                        self._save(epoch + 1)
                self._report(progress, entry)
                if stop:
                    logger.info("no better validation value in %d evaluations: stopped", config.optim.patience)
                    break
        self._save_weights()
        return self._record()

    def _train_epoch(self, epoch: int) -> float:
        """One pass over the epoch's sequences; the mean loss over all labelled tokens of all ranks."""
        self.model.train()
        self.parallel.reset_traffic()  # what evaluation sent
        total, count = 0.0, 0
        for fraction, batch in self.system.train_batches(epoch, self.step):
            set_learning_rate(self.optimizer, self.config, epoch + fraction)
            kind = batch.kind if batch is not None else "sparse"
            with self.timer.step(kind):
                loss, labels = train_step(self.system, self.model, self.optimizer, batch)
            self.step += 1
            self.kind_counts[kind] += 1
            total, count = total + loss, count + labels
        for category, sent in self.parallel.traffic_totals().items():
            before = self.traffic.get(category, [0, 0])
            self.traffic[category] = [a + b for a, b in zip(before, sent, strict=True)]
        mean = total / count if count else math.nan
        if count and not math.isfinite(mean):
            raise FloatingPointError(f"the loss is {mean} in epoch {epoch + 1}; a lower optim.lr may help")
        return mean

    def _evaluate(self, epoch: int) -> dict[str, float]:
        """Score every split on logits of the whole graph; remember the best validation epoch."""
        start = time.perf_counter()
        logits_NC = predict(self.system, self.model)
        scores = {}
        if self.parallel.rank == 0:
            for split, nodes in self.system.splits.items():
                scores[split] = evaluate(self.system.metric, self.system.target, logits_NC[nodes], self.system.y[nodes])
        scores = self.parallel.broadcast_object(lambda: scores)
        select = "test" if self.config.protocol == "artifact" else "valid"
        self.since_better += 1
        if better(self.system.metric, scores[select], self.best.get(select)):
            self.since_better = 0
            weights = {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}
            self.best = {**scores, "epoch": epoch, "weights": weights}
        self.eval_seconds.append(time.perf_counter() - start)
        return scores

    def _lock_run_folder(self) -> None:
        """Hold the run folder for as long as this process lives: two trainers would mix their checkpoints."""
        if self.checkpoints is None or self.parallel.rank:
            return
        folder = self.checkpoints.folder
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(folder / ".lock")
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            raise BusyError(f"another process trains in {folder}") from None

    # Checkpoints --------------------------------------------------------------------------------------------------

    def _save(self, epoch: int) -> None:
        self.checkpoints.save(
            epoch,
            {
                "config_sha256": self.config.sha256(),
                "store_sha256": self.store.digest,
                "step": self.step,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "history": self.history,
                "best": self.best,
                "since_better": self.since_better,
                "kind_counts": self.kind_counts,
                "epoch_seconds": self.epoch_seconds,
                "eval_seconds": self.eval_seconds,
                "timer": self.timer.state_dict(),
                "traffic": self.traffic,
                "wall_s": self.wall_before + time.perf_counter() - self.started,
            },
        )

    def _resume(self) -> int:
        """Load the newest whole checkpoint on rank 0 and share it; the number of finished epochs."""
        if self.checkpoints is None:
            return 0
        state = self.parallel.broadcast_object(lambda: self.checkpoints.load(self.config.sha256(), self.store.digest))
        if state is None:
            return 0
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.history, self.best = state["step"], state["history"], state["best"]
        self.since_better, self.kind_counts = state["since_better"], state["kind_counts"]
        self.epoch_seconds, self.eval_seconds = state["epoch_seconds"], state["eval_seconds"]
        self.timer.load_state_dict(state["timer"])
        self.traffic = state["traffic"]
        self.wall_before = state["wall_s"]
        restore_rng(state["rng"])
        if state["epoch"]:
            logger.info("resumed after epoch %d of %d", state["epoch"], self.config.epochs)
        return self.config.epochs if self._stopped_early() else state["epoch"]

    def _stopped_early(self) -> bool:
        return bool(self.config.optim.patience) and self.since_better >= self.config.optim.patience

    def _save_weights(self) -> None:
        """The weights of the best validation epoch, beside the checkpoints."""
        if self.checkpoints is None or self.parallel.rank or "weights" not in self.best:
            return
        from safetensors.torch import save_file

        path = self.checkpoints.folder / "model.safetensors"
        temporary = path.with_suffix(".tmp")
        save_file({name: value.contiguous() for name, value in self.best["weights"].items()}, temporary)
        os.replace(temporary, path)

    # Reports ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _progress(self, first_epoch: int) -> Iterator[tqdm | None]:
        """A bar with rate and ETA on a terminal; otherwise None, and one log line an epoch."""
        shown = sys.stderr.isatty() or os.environ.get("TORCHGT_PROGRESS") == "1"
        if not shown or self.parallel.rank:
            yield None
            return
        name = f"{self.config.system} on {self.store.name}"
        with tqdm(total=self.config.epochs, initial=first_epoch, desc=name, unit="epoch", file=sys.stderr) as progress:
            yield progress

    def _report(self, progress: tqdm | None, entry: dict[str, Any]) -> None:
        shown = {key: entry[key] for key in ("loss", "train", "valid") if key in entry}
        if progress is not None:
            progress.set_postfix({key: f"{value:.4f}" for key, value in shown.items()}, refresh=False)
            progress.update()
        elif self.parallel.rank == 0:
            values = "  ".join(f"{key} {value:.4f}" for key, value in shown.items())
            logger.info("epoch %d/%d  %s  %.2f s", entry["epoch"], self.config.epochs, values, entry["seconds"])

    def _write_partial(self) -> None:
        """Leave what is known already to the supervisor, should this process die."""
        if self.checkpoints is not None and self.parallel.rank == 0:
            record = self._record(status="error", error="the trainer ended without a record")
            write_json_atomic(self.checkpoints.folder / "partial.json", record.to_dict())

    def _record(self, status: str = "ok", error: str | None = None) -> RunRecord:
        config, system, store = self.config, self.system, self.store
        steps = self.timer.summary()
        seconds = {kind: steps[kind]["median"] for kind in steps}
        schedule = getattr(system, "schedule", None)
        if schedule is not None and schedule.dense_every and {"sparse", "dense"} <= set(seconds):
            amortised = schedule.amortised(seconds["sparse"], seconds["dense"])
        else:
            amortised = next(iter(seconds.values()), None)
        facts = system.pattern_facts()
        tokens = config.sequence.tokens or system.num_nodes
        best = {key: value for key, value in self.best.items() if key != "weights"}
        return RunRecord(
            status=status,
            error=error,
            system=config.system,
            model=config.model,
            dataset=store.name,
            store_sha256=store.digest,
            split=config.split,
            seed=config.seed,
            protocol=config.protocol,
            config=config.to_dict(),
            config_sha256=config.sha256(),
            world_size=self.parallel.world_size,
            parallel=config.parallel.strategy if system.parallelism == "sequence" else "data",
            device=str(system.device.type),
            precision=config.precision,
            threads=torch.get_num_threads(),
            seq_len=tokens if config.sequence.kind != "full" else system.num_nodes,
            num_params=sum(p.numel() for p in self.model.parameters()),
            machine_class=machine_class(system.device),
            provenance=code_provenance(type(system)),
            time={
                "preprocess_s": self.preprocess_s,
                "preprocess": system.seconds,
                "compile_s": 0.0,
                "step_s": {**steps, "amortised": amortised},
                "epoch_s": statistics.median(self.epoch_seconds) if self.epoch_seconds else None,
                "eval_s": statistics.median(self.eval_seconds) if self.eval_seconds else None,
                "total_s": self.wall_before + time.perf_counter() - self.started,
            },
            throughput={
                "tokens_per_s": min(tokens, system.num_nodes) / amortised if amortised else None,
                "pairs_per_s": facts["pairs"] / amortised if amortised and "pairs" in facts else None,
            },
            memory=self.memory.report(system.device),
            traffic=self._traffic(),
            pattern={
                **facts,
                "edges_kept": self.edges_kept,
                "dense_steps": self.kind_counts["dense"],
                "sparse_steps": self.kind_counts["sparse"],
            },
            metric={
                "name": system.metric,
                **{split: best.get(split) for split in system.splits},
                "best_epoch": best.get("epoch"),
                "majority": majority_share(system.target, system.y[system.splits["test"]]),
                "eval": system.eval_mode(),
            },
            history=self.history,
            budget={"seconds": config.budget.seconds, "memory_bytes": config.budget.memory_bytes},
        )

    def _traffic(self) -> dict[str, Any]:
        steps = max(1, self.step)
        return {
            "bytes_sent_per_step_per_rank": {category: sent / steps for category, (sent, _) in self.traffic.items()},
            "calls": {category: calls / steps for category, (_, calls) in self.traffic.items()},
        }


# Pieces of a step, shared with the benchmarks -------------------------------------------------------------------------


def train_step(
    system: System, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch | None
) -> tuple[float, int]:
    """Forward, backward, gradient reduction, clipping, and the optimiser's step.

    The loss is the mean over the labelled training tokens of all ranks, so a rank with none contributes 0.

    Returns:
        The loss summed over those tokens of all ranks, and their number.
    """
    optimizer.zero_grad(set_to_none=True)
    parallel = system.parallel
    loss = None
    sums = torch.zeros(2, dtype=torch.float64)
    if batch is not None:
        context = system.step_context(batch)
    else:
        context = contextlib.nullcontext()
    with context:
        if batch is not None:
            logits = forward(system, model, batch)
            loss, labels = loss_sum(system.target, logits[batch.weight], batch.y[batch.weight])
            sums = torch.stack([loss.detach().double().cpu(), labels.double().cpu()])
        sums = parallel.all_reduce_sum(sums)
        if loss is not None and loss.requires_grad:
            (loss / (batch.loss_tokens or max(1.0, sums[1].item()))).backward()
    parameters = [p for p in model.parameters() if p.requires_grad]
    parallel.all_reduce_gradients(parameters)
    clip = system.config.optim.grad_clip
    if clip:
        torch.nn.utils.clip_grad_norm_(parameters, clip)
    if sums[1] > 0:
        optimizer.step()
    return sums[0].item(), int(sums[1].item())


def forward(system: System, model: nn.Module, batch: Batch) -> Tensor:
    """Logits [N_r, C] in the parameters' dtype; bf16 runs under autocast."""
    bf16 = system.config.precision == "bf16"
    with torch.autocast(system.device.type, torch.bfloat16, enabled=bf16):
        return model(batch).to(system.dtype)


@torch.no_grad()
def predict(system: System, model: nn.Module) -> Tensor | None:
    """Logits [N, C] of every node, in the store's order, on rank 0's CPU; None on other ranks."""
    model.eval()
    parallel = system.parallel
    logits_NC = torch.zeros(system.num_nodes, system.num_outputs, dtype=system.dtype)
    for batch in system.eval_batches():
        with system.step_context(batch):
            share = forward(system, model, batch).cpu()
        logits_NC[batch.nodes[batch.token_offset : batch.token_offset + len(share)]] = share
    if parallel.world_size > 1:  # every node is held by one rank, the others have 0 there
        logits_NC = parallel.all_reduce_sum(logits_NC)
    return logits_NC if parallel.rank == 0 else None


def set_learning_rate(optimizer: torch.optim.Optimizer, config: RunConfig, epoch: float) -> None:
    """Linear warm-up, then linear decay from `lr` to `end_lr`; `epoch` counts finished epochs, with fractions."""
    rate = learning_rate(config, epoch)
    for group in optimizer.param_groups:
        group["lr"] = rate


def learning_rate(config: RunConfig, epoch: float) -> float:
    optim = config.optim
    warmup = min(optim.warmup_epochs, config.epochs / 2)
    if epoch < warmup:
        return optim.lr * epoch / warmup
    left = (config.epochs - epoch) / max(1e-12, config.epochs - warmup)
    return optim.end_lr + (optim.lr - optim.end_lr) * min(1.0, max(0.0, left))


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into Interrupted, where this is the main thread."""

    def handler(number: int, frame: Any) -> None:
        raise Interrupted(f"stopped by {signal.Signals(number).name}")

    try:
        before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: the caller's handlers stay
        yield
        return
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


__all__ = ["Interrupted", "Trainer", "learning_rate", "predict", "train", "train_step"]
