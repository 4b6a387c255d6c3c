# Data sets: one store each, made whole or not at all.


rule prepare:
    input:
        code=lambda wildcards: MATRIX.datasets[wildcards.dataset].files,
        whole=branch(
            lambda wildcards: MATRIX.datasets[wildcards.dataset].whole,
            then=lambda wildcards: f"{whole_store(MATRIX.datasets[wildcards.dataset])}/meta.json",
        ),
    output:
        f"{RESULTS}/stores/{{dataset}}/meta.json",
    log:
        f"{RESULTS}/logs/prepare/{{dataset}}.log",
    conda:
        "../envs/torchgt.yaml"
    params:
        arguments=lambda wildcards: prepare_arguments(
            MATRIX.datasets[wildcards.dataset]
        ),
        store=subpath(output[0], parent=True),
    shell:
        "python -m datasets.prepare {params.arguments:q} --out {params.store:q} --force > {log:q} 2>&1"
        " || {{ tail -n 3 {log:q} >&2; exit 1; }}"
