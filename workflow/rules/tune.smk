# The search for learning rate and dropout: the same grid for every system, chosen on validation.
# `snakemake --configfile config/tune.yaml -- tune` rewrites the file that the configuration names.


rule choose:
    input:
        [f"{folder}/record.json" for folder in MATRIX.trials],
    output:
        f"{RESULTS}/tune/hyperparameters.yaml",
    log:
        f"{RESULTS}/logs/tune.log",
    conda:
        "../envs/torchgt.yaml"
    params:
        search=lambda wildcards: MATRIX.config.get("tune"),
    script:
        "../scripts/choose.py"


rule tune:
    input:
        rules.choose.output[0],
    log:
        f"{RESULTS}/logs/tune.install.log",
    localrule: True
    conda:
        "../envs/torchgt.yaml"
    params:
        target=lambda wildcards: MATRIX.config["tune"]["output"],
    shell:
        # By rename, so that a reader never sees half a file.
        "(cp {input:q} {params.target:q}.new && mv {params.target:q}.new {params.target:q}"
        " && echo {params.target:q}) 2>&1 | tee -i {log:q}"
