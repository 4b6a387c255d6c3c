# What the other rules share: the matrix of runs that the configuration asks for, and look-ups in it.
import json
import re

from matrix import Matrix, MatrixError
from snakemake.exceptions import WorkflowError

try:
    MATRIX = Matrix(config)
except MatrixError as error:
    raise WorkflowError(str(error)) from None

RESULTS = MATRIX.results
GROUPS = [re.escape(group) for group in MATRIX.groups]

if MATRIX.planned:
    logger.warning(
        f"no module prepares these data sets yet, so their runs cannot be made: {', '.join(MATRIX.planned)}"
    )


wildcard_constraints:
    dataset="|".join(MATRIX.datasets) or "none",
    model=r"[\w-]+",
    group="|".join(GROUPS) or "none",
    system="|".join(MATRIX.systems),
    seed=r"\d+",


def run_job(wildcards):
    return MATRIX.jobs[
        f"{RESULTS}/runs/{wildcards.group}/{wildcards.model}/{wildcards.system}/seed-{wildcards.seed}"
    ]


def bench_job(wildcards):
    return MATRIX.benches[
        f"{RESULTS}/scaling/{wildcards.dataset}/{wildcards.model}/{wildcards.system}"
    ]


def drawn():
    figures = expand(
        "{results}/figures/{figure}.{kind}",
        results=RESULTS,
        figure=MATRIX.figures,
        kind=["png", "pdf", "csv"],
    )
    return figures + expand(
        "{results}/tables/{table}.{kind}",
        results=RESULTS,
        table=MATRIX.tables,
        kind=["md", "csv"],
    )


def prepare_arguments(dataset):
    """Arguments of `python -m datasets.prepare`, without the place of the store."""
    if dataset.module:
        options = json.dumps(dataset.options, sort_keys=True)
        return [
            "--module",
            dataset.module,
            "--name",
            dataset.name,
            "--options",
            options,
        ]
    arguments = [dataset.source, "--name", dataset.name]
    for flag, value in (("--nodes", dataset.nodes), ("--seed", dataset.seed)):
        arguments += [] if value is None else [flag, str(value)]
    return arguments


def caption(drawing):
    return f"../report/{drawing.name if drawing.builtin else 'own'}.rst"
