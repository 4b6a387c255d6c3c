# Thin wrapper, so that `snakemake` works from the checkout and other workflows can use this one as a module.
module main:
    snakefile:
        "workflow/Snakefile"


use rule * from main
