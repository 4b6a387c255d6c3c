# Training: one configuration, one record a run. A run that dies of memory or time leaves a record as well.


# Written from the matrix whenever its text changes, so that an edit of the configuration redoes just the runs
# that it changes.
rule run_config:
    output:
        f"{RESULTS}/runs/{{group}}/{{model}}/{{system}}/seed-{{seed}}/config.yaml",
    log:
        f"{RESULTS}/logs/runs/{{group}}/{{model}}/{{system}}/seed-{{seed}}.config.log",
    localrule: True
    conda:
        "../envs/torchgt.yaml"
    params:
        text=lambda wildcards: run_job(wildcards).text,
    shell:
        "printf '%s' {params.text:q} > {output:q} 2> {log:q}"


# Checkpoints lie outside the outputs: Snakemake deletes those before a rerun, and an interrupted run resumes. Their
# folder is named by a checksum of what the run reads, so that it never resumes what was made from something else.
rule train:
    input:
        config=rules.run_config.output[0],
        store=lambda wildcards: f"{RESULTS}/stores/{run_job(wildcards).dataset}/meta.json",
        plugin=lambda wildcards: run_job(wildcards).files,
    output:
        f"{RESULTS}/runs/{{group}}/{{model}}/{{system}}/seed-{{seed}}/record.json",
    log:
        f"{RESULTS}/logs/runs/{{group}}/{{model}}/{{system}}/seed-{{seed}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/runs/{{group}}/{{model}}/{{system}}/seed-{{seed}}.tsv"
    conda:
        "../envs/torchgt.yaml"
    threads: MATRIX.threads
    resources:
        timed=1,
    params:
        run_dir=f"{RESULTS}/checkpoints/{{group}}/{{model}}/{{system}}/seed-{{seed}}",
    shell:
        "python -m torchgt train --config {input.config:q} --out {output:q} --run-dir"
        ' {params.run_dir:q}/"$(cat {input.store:q} {input.plugin:q} | cksum | cut -d " " -f 1)"'
        " 2>&1 | tee -i {log:q}"
