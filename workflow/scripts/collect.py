"""Collect the records of a pipeline into its tables. Their paths go through a file: a matrix has thousands."""

import subprocess
import sys
import tempfile
from pathlib import Path


def main(records: list[str], folder: str, log: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        listing = Path(scratch) / "records.txt"
        listing.write_text("".join(f"{path}\n" for path in records), encoding="utf-8")
        command = [sys.executable, "-m", "figures.collect", "--out", folder, "--records-file", str(listing)]
        result = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    Path(log).write_text(result.stdout, encoding="utf-8")
    if result.returncode:
        sys.exit(result.stdout)


if "snakemake" in globals():
    snakemake = globals()["snakemake"]
    main([*snakemake.input.records, *snakemake.input.rows], snakemake.params.folder, snakemake.log[0])
