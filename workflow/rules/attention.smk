# Implementations of attention side by side: verified, then timed in turns.


rule attention_config:
    output:
        f"{RESULTS}/attention/{{bench}}/config.yaml",
    log:
        f"{RESULTS}/logs/attention/{{bench}}.config.log",
    localrule: True
    conda:
        "../envs/torchgt.yaml"
    params:
        text=lambda wildcards: attention_job(wildcards).text,
    shell:
        "printf '%s' {params.text:q} > {output:q} 2> {log:q}"


rule bench_attention:
    input:
        config=rules.attention_config.output[0],
        store=lambda wildcards: f"{RESULTS}/stores/{attention_job(wildcards).dataset}/meta.json",
        plugin=lambda wildcards: attention_job(wildcards).files,
    output:
        f"{RESULTS}/attention/{{bench}}/rows.json",
    log:
        f"{RESULTS}/logs/attention/{{bench}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/attention/{{bench}}.tsv"
    conda:
        "../envs/torchgt.yaml"
    threads: MATRIX.threads
    resources:
        timed=1,
    shell:
        "python -m torchgt bench attention --config {input.config:q} --out {output:q} 2>&1 | tee -i {log:q}"
