# Records into tidy tables: one row a run, a timed length, or an epoch.


rule collect:
    input:
        records=[f"{folder}/record.json" for folder in MATRIX.runs],
        rows=[f"{folder}/rows.json" for folder in [*MATRIX.benches, *MATRIX.attention]],
        code=["figures/collect.py", "figures/records.py"],
    output:
        expand(
            "{results}/tables/{table}.{kind}",
            results=RESULTS,
            table=["runs", "scaling", "history", "attention"],
            kind=["csv", "parquet"],
        ),
    log:
        f"{RESULTS}/logs/collect.log",
    conda:
        "../envs/torchgt.yaml"
    params:
        folder=subpath(output[0], parent=True),
    script:
        "../scripts/collect.py"
