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
    bench=r"[\w.-]+",


def run_job(wildcards):
    return MATRIX.jobs[
        f"{RESULTS}/runs/{wildcards.group}/{wildcards.model}/{wildcards.system}/seed-{wildcards.seed}"
    ]


def bench_job(wildcards):
    return MATRIX.benches[
        f"{RESULTS}/scaling/{wildcards.dataset}/{wildcards.model}/{wildcards.system}"
    ]


def attention_job(wildcards):
    return MATRIX.attention[f"{RESULTS}/attention/{wildcards.bench}"]


def wanted():
    """Every file that the configuration asks for.

    The records are among them although the figures need them anyway: Snakemake does not miss an intermediate file
    that was deleted.
    """
    return (
        [f"{folder}/record.json" for folder in MATRIX.runs]
        + [f"{folder}/rows.json" for folder in [*MATRIX.benches, *MATRIX.attention]]
        + expand(
            f"{RESULTS}/tables/{{table}}.parquet",
            table=["runs", "scaling", "history", "attention"],
        )
        + expand(
            f"{RESULTS}/figures/{{figure}}.{{kind}}",
            figure=MATRIX.figures,
            kind=["png", "pdf", "csv"],
        )
        + expand(
            f"{RESULTS}/tables/{{table}}.{{kind}}",
            table=MATRIX.tables,
            kind=["md", "csv"],
        )
    )


def prepare_arguments(dataset):
    """Arguments of `python -m datasets.prepare`, without the place of the store."""
    if dataset.module:
        options = dataset.options.items()
        return ["--module", dataset.module] + [
            f"--option={key}={json.dumps(value)}" for key, value in options
        ]
    arguments = [dataset.source]
    for flag, value in (
        ("nodes", dataset.nodes),
        ("seed", dataset.seed),
        ("from-store", whole_store(dataset)),
    ):
        arguments += [] if value is None else [f"--{flag}={value}"]
    return arguments


def whole_store(dataset):
    """The store that a part is cut from; None: the module builds the whole itself."""
    return None if dataset.whole is None else f"{RESULTS}/stores/{dataset.whole}"


def caption(drawing):
    return f"../report/{drawing.name if drawing.builtin else 'own'}.rst"
