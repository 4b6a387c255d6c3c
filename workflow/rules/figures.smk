# Figures and tables read the collected tables and nothing else, so that drawing never retrains.
TABLE_FILES = expand(
    "{results}/tables/{table}.csv",
    results=RESULTS,
    table=["runs", "scaling", "history", "attention"],
)
REFERENCE_FILES = sorted(str(path) for path in Path("figures/reference").glob("*.csv"))

# One rule a figure, because a caption cannot depend on a wildcard.
for drawing in MATRIX.figures.values():

    rule:
        name:
            f"figure_{drawing.name}"
        input:
            tables=TABLE_FILES,
            code=drawing.files,
            reference=REFERENCE_FILES,
        output:
            png=report(
                f"{RESULTS}/figures/{drawing.name}.png",
                caption=caption(drawing),
                category="Figures",
                labels={"figure": drawing.name, "format": "PNG"},
            ),
            pdf=f"{RESULTS}/figures/{drawing.name}.pdf",
            csv=report(
                f"{RESULTS}/figures/{drawing.name}.csv",
                caption=caption(drawing),
                category="Figures",
                labels={"figure": drawing.name, "format": "CSV"},
            ),
        log:
            f"{RESULTS}/logs/figures/{drawing.name}.log",
        conda:
            "../envs/torchgt.yaml"
        params:
            module=drawing.module,
            tables=subpath(input[0], parent=True),
            prefix=subpath(output.png, strip_suffix=".png"),
        shell:
            "python -m {params.module:q} --tables {params.tables:q} --out {params.prefix:q} > {log:q} 2>&1"
            " || {{ tail -n 3 {log:q} >&2; exit 1; }}"


for drawing in MATRIX.tables.values():

    rule:
        name:
            f"table_{drawing.name}"
        input:
            tables=TABLE_FILES,
            code=drawing.files,
            reference=REFERENCE_FILES,
        output:
            md=f"{RESULTS}/tables/{drawing.name}.md",
            csv=report(
                f"{RESULTS}/tables/{drawing.name}.csv",
                caption=caption(drawing),
                category="Tables",
                labels={"table": drawing.name},
            ),
        log:
            f"{RESULTS}/logs/tables/{drawing.name}.log",
        conda:
            "../envs/torchgt.yaml"
        params:
            module=drawing.module,
            tables=subpath(input[0], parent=True),
            prefix=subpath(output.md, strip_suffix=".md"),
        shell:
            "python -m {params.module:q} --tables {params.tables:q} --out {params.prefix:q} > {log:q} 2>&1"
            " || {{ tail -n 3 {log:q} >&2; exit 1; }}"
