# Step time and memory against sequence length: one process times all lengths of a system.


rule bench_config:
    output:
        f"{RESULTS}/scaling/{{dataset}}/{{model}}/{{system}}/config.yaml",
    log:
        f"{RESULTS}/logs/scaling/{{dataset}}/{{model}}/{{system}}.config.log",
    localrule: True
    conda:
        "../envs/torchgt.yaml"
    params:
        text=lambda wildcards: bench_job(wildcards).text,
    shell:
        "printf '%s' {params.text:q} > {output:q} 2> {log:q}"


rule bench_steps:
    input:
        config=rules.bench_config.output[0],
        store=f"{RESULTS}/stores/{{dataset}}/meta.json",
        plugin=lambda wildcards: bench_job(wildcards).files,
    output:
        f"{RESULTS}/scaling/{{dataset}}/{{model}}/{{system}}/rows.json",
    log:
        f"{RESULTS}/logs/scaling/{{dataset}}/{{model}}/{{system}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/scaling/{{dataset}}/{{model}}/{{system}}.tsv"
    conda:
        "../envs/torchgt.yaml"
    threads: MATRIX.threads
    resources:
        timed=1,
    shell:
        "python -m torchgt bench steps --config {input.config:q} --out {output:q} 2>&1 | tee -i {log:q}"
