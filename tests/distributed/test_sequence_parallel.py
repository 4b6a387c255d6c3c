"""A sequence split over workers gives what one process gives: outputs, all gradients, and traffic as calculated.

One start of torchrun for each number of workers runs every case of `cases.py` on gloo; one worker is plain Python.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.cases import CASES
from torchgt import AttentionPattern, Graph, SequenceParallel, graph_attention
from torchgt.parallel import init_distributed

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda workers: f"{workers}-workers")
def results(request, tmp_path_factory) -> list[dict[str, str | None]]:
    """For each worker: case -> None, or how it failed."""
    folder = tmp_path_factory.mktemp("workers")
    # --standalone: a free port each time, so that two runs on one machine do not meet.
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    launch = launch if request.param > 1 else []
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    done = subprocess.run(
        [sys.executable, *launch, str(ROOT / "tests/distributed/cases.py"), str(folder)],
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{request.param}-{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("name", CASES)
def test_case(results, name):
    failures = {f"worker {rank}": result[name] for rank, result in enumerate(results) if result[name]}
    assert not failures, "\n".join(f"{worker}:\n{text}" for worker, text in failures.items())


# One process, no group ------------------------------------------------------------------------------------------------


def test_without_a_group_everything_is_local(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert init_distributed() is None
    sp = SequenceParallel(None)
    assert (sp.rank, sp.world_size, sp.shard_sizes(7), sp.local_slice(7)) == (0, 1, [7], slice(0, 7))
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3)
    pattern, x = AttentionPattern.from_graph(graph), torch.randn(3, 2, 4)
    assert torch.equal(sp.attention(x, x, x, pattern), graph_attention(x, x, x, pattern))
    assert sp.broadcast_object(lambda: 5) == 5
    assert sp.traffic_totals() == {key: (0, 0) for key in ("attention", "global", "bias", "parameters")}


def test_strategies_are_named():
    with pytest.raises(ValueError, match="all-to-all.*did you mean 'all_to_all'"):
        SequenceParallel(None, strategy="all-to-all")
    for later in ("halo", "ring"):
        with pytest.raises(NotImplementedError, match=f"{later}.*available: all_to_all"):
            SequenceParallel(None, strategy=later)


def test_unknown_device_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="device: .*found 'tpu'"):
        init_distributed(device="tpu")
