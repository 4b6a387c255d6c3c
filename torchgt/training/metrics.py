"""Losses and metrics by target. Unlabelled entries (-1, NaN) count nowhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchgt.data.store import metrics_for
from torchgt.errors import ConfigError, unknown

LOWER_IS_BETTER = frozenset({"mae"})


def check_metric(target: str, metric: str) -> str:
    """`metric` if `target` has it, else ConfigError that lists those it has."""
    if metric not in metrics_for(target):
        raise ConfigError(f"evaluation.metric: {unknown('metric', metric, metrics_for(target))} (target {target!r})")
    return metric


def labelled(target: str, y: Tensor) -> Tensor:
    """bool [N]: rows of `y` ([N] or [N, T]) with at least one label."""
    if y.is_floating_point():
        known = ~y.isnan()
    else:
        known = y >= 0
    return known if y.dim() == 1 else known.any(dim=1)


def loss_sum(target: str, logits_NC: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the loss over labelled entries, and how many there are (int64 scalar).

    `y` is [N] integer classes (multiclass), or [N] / [N, T] floating or integer otherwise. Sums rather than means,
    so that ranks with different numbers of labels add up to the one-process loss.
    """
    if target == "multiclass":
        known = y >= 0
        loss = F.cross_entropy(logits_NC, y.clamp(min=0), reduction="none")
    else:
        logits, y = _align(logits_NC, y)
        known = ~y.isnan() & (y >= 0) if target != "regression" else ~y.isnan()
        clean = torch.where(known, y, torch.zeros_like(y))
        if target == "regression":
            loss = (logits - clean).abs()
        else:
            loss = F.binary_cross_entropy_with_logits(logits, clean, reduction="none")
    return torch.where(known, loss, torch.zeros_like(loss)).sum(), known.sum()


def evaluate(metric: str, target: str, logits_NC: Tensor, y: Tensor) -> float:
    """The metric over labelled entries, as a fraction (mae: in the target's unit); NaN if nothing is labelled.

    Multi-task AUC and AP average over the tasks that have both classes.
    """
    if metric == "accuracy" and target == "multiclass":
        known = y >= 0
        if not known.any():
            return float("nan")
        return (logits_NC.argmax(dim=1) == y)[known].double().mean().item()
    logits, y = _align(logits_NC, y)
    known = ~y.isnan() & ((y >= 0) if target != "regression" else True)
    if not known.any():
        return float("nan")
    if metric == "mae":
        return (logits - y)[known].abs().double().mean().item()
    if metric == "accuracy":
        return ((logits > 0) == (y > 0.5))[known].double().mean().item()
    if metric == "f1_micro":
        from torchmetrics.functional.classification import binary_f1_score

        return binary_f1_score((logits > 0)[known].int(), y[known].int()).item()
    return _mean_over_tasks(metric, logits, y, known)


def _mean_over_tasks(metric: str, logits: Tensor, y: Tensor, known: Tensor) -> float:
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision

    score = {"rocauc": binary_auroc, "ap": binary_average_precision}[metric]
    values = []
    for task in range(y.shape[1]):
        rows = known[:, task]
        truth = y[rows, task].int()
        if truth.numel() and truth.min() != truth.max():
            values.append(score(logits[rows, task].sigmoid(), truth).item())
    return sum(values) / len(values) if values else float("nan")


def _align(logits_NC: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    y = y.to(logits_NC.dtype)
    return logits_NC, y.reshape(logits_NC.shape)


def better(metric: str, value: float, best: float | None) -> bool:
    """Whether `value` beats `best`. NaN never does; ties keep the earlier one."""
    if value != value:
        return False
    if best is None:
        return True
    return value < best if metric in LOWER_IS_BETTER else value > best


def majority_share(target: str, y: Tensor) -> float | None:
    """Accuracy of always answering the most frequent class; None for other targets than multiclass."""
    known = y[y >= 0] if target == "multiclass" else y[:0]
    return None if len(known) == 0 else (known.bincount().max() / len(known)).item()
