"""Figures and tables over made-up records: what is compared, what is refused, what a failure looks like."""

import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("matplotlib")

from figures import accuracy, attention, collect, convergence, records, results, sequence_length, speedup, style

FIGURES = {"speedup": speedup, "sequence_length": sequence_length, "accuracy": accuracy, "convergence": convergence}
FIGURES["attention"] = attention
MACHINE = {
    "cpu_model": "Example CPU",
    "threads": 2,
    "gpu_model": None,
    "gpu_count": 0,
    "driver": None,
    "torch": "2.13.0",
}
OTHER = MACHINE | {"cpu_model": "Another CPU"}
LENGTHS = [1024, 2048, 4096, 8192, 16384, 32768, 65536, 117659]

# system: (seconds at 1,024 tokens, exponent, longest length, what ended it)
STEPS = {
    "torchgt": (0.011, 1.02, 117659, None),
    "gp-flash": (0.07, 1.95, 16384, "timeout"),
    "gp-raw": (0.16, 2.0, 4096, "oom"),
    "gp-sparse": (0.03, 1.04, 117659, None),
    "sage": (0.009, 1.01, 117659, None),
    "random-blocks": (0.012, 1.02, 117659, None),
}
TEST = {"torchgt": 0.81, "gp-raw": 0.62, "gp-flash": 0.55, "gp-sparse": 0.8, "gcn": 0.69, "sage": 0.765, "mlp": 0.546}
TEST |= {"random-blocks": 0.5, "my-attention": 0.7}

ALL_IMPLS = ("cpu", "scatter", "other.lib:pyg_transformer_conv")


def run_record(group, system, seed, status="ok", tokens=2048, machine=MACHINE, **changes):
    rng = np.random.default_rng([seed, len(system)])
    final = TEST[system] + rng.normal(0, 0.006)
    epochs = 40 if status == "ok" else 8
    seconds = {"mlp": 0.02, "gp-raw": 1.3, "gp-flash": 0.9}.get(system, 0.1)
    valid = final * (1 - np.exp(-np.arange(1, epochs + 1) / 9)) + rng.normal(0, 0.003, epochs)
    history = [
        {"epoch": e + 1, "loss": 1.0, "valid": valid[e], "seconds": seconds, "beta": None} for e in range(epochs)
    ]
    record = {
        "format": 1, "status": status, "error": None if status == "ok" else "over budget", "system": system,
        "model": "graphormer-slim", "dataset": group, "seed": seed, "protocol": "standard", "seq_len": tokens,
        "config": {"optim": {"lr": 0.005}, "dropout": 0.1}, "world_size": 1, "device": "cpu", "precision": "fp32",
        "threads": 2, "machine_class": machine, "results_version": 1, "num_params": 110_000,
        "time": {"preprocess_s": 0.8, "compile_s": 0.2, "epoch_s": seconds, "eval_s": 0.1, "total_s": 9.0},
        "memory": {"baseline_bytes": 3e8, "peak_bytes": 2.5e8}, "pattern": {"pairs": 20_000, "recall": 1.0},
        "metric": {"name": "accuracy", "eval": "whole"}, "history": history,
    }  # fmt: skip
    if status == "ok":
        record["metric"] |= {"train": final + 0.1, "valid": final, "test": final, "best_epoch": 38}
        record["time"]["step_s"] = {"sparse": {"median": seconds, "q25": seconds, "q75": seconds, "n": 40}}
    return record | changes


def step_row(system, length, model="graphormer-slim", status="ok", machine=MACHINE):
    base, slope, _, _ = STEPS[system]
    step_s = base * ((length or 0) / 1024) ** slope
    kind = "dense" if system in ("gp-flash", "gp-raw") else "sparse"
    spread = {"median": step_s, "q25": step_s * 0.97, "q75": step_s * 1.05, "n": 10}
    row = {
        "format": 1, "status": status, "error": None, "system": system, "model": model, "dataset": "wordnet",
        "seq_len": length, "machine_class": machine, "budget": {"seconds": 20.0, "memory_bytes": 6 * 2**30},
        "time": {"step_s": {}}, "memory": {}, "pattern": {}, "threads": 2,
    }  # fmt: skip
    if status != "ok":
        return row | {"error": f"over the budget at {length}"}
    row["time"]["step_s"][kind] = spread
    if system == "torchgt":
        dense = 0.07 * (min(length, 4096) / 1024) ** 1.95
        row["time"]["step_s"]["dense"] = spread | {"median": dense}
        row["time"]["step_s"]["amortised"] = {str(k): ((k - 1) * step_s + dense) / k for k in (5, 10, 50)}
    quadratic = 30 * length**2 if system == "gp-raw" else 0
    row["memory"] = {"baseline_bytes": 3e8, "peak_bytes": 2e7 + 4000 * length + quadratic}
    row["pattern"] = {"pairs": 6 * length, "recall": 1.0 if system != "random-blocks" else 0.003}
    return row


def bench(system, model="graphormer-slim", **changes):
    _, _, longest, end = STEPS[system]
    rows = [step_row(system, n, model, **changes) for n in LENGTHS if n <= longest]
    if end:
        rows.append(step_row(system, 2 * longest, model, end))
    return {"format": 1, "kind": "bench-steps", "rows": rows}


class Store:
    """Writes records into the pipeline's folders and collects them."""

    def __init__(self, root):
        self.root, self.folder, self.paths = root, root / "tables", []

    def put(self, path, content):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
        self.paths.append(str(path))

    def run(self, group, system, seed, *arguments, **changes):
        record = run_record(group, system, seed, *arguments, **changes)
        self.put(f"runs/{group}/{record['model']}/{system}/seed-{seed}/record.json", record)

    def rows(self, system, rows, model="gt"):
        content = {"format": 1, "kind": "bench-steps", "rows": rows}
        self.put(f"scaling/wordnet/{model}/{system}/rows.json", content)

    def bench(self, system, model="graphormer-slim", **changes):
        _, _, longest, end = STEPS[system]
        rows = [step_row(system, n, model, **changes) for n in LENGTHS if n <= longest]
        self.rows(system, rows + ([step_row(system, 2 * longest, model, end)] if end else []), model)

    def attention(self, bench, points, ended=()):
        """Rows of made-up times; `points` are (tokens, heads, head dimension)."""
        rows = []
        ended = list(ended)
        for (tokens, heads, dim), impl in itertools.product(points, ALL_IMPLS):
            shared = {
                "impl": impl, "num_tokens": tokens, "pairs": 4 * tokens, "heads": heads, "head_dim": dim,
                "precision": "fp32", "bias": "none", "threads": 2, "machine_class": MACHINE,
            }  # fmt: skip
            slow = {"cpu": 1.0, "scatter": 22.0}.get(impl, 24.0)
            for phase, share in (("forward", 1.0), ("backward", 2.2), ("total", 3.2)):
                floor = share * tokens * heads * dim * 1e-9
                row = shared | {"phase": phase, "status": "ok", "error": None, "floor_s": floor, "bytes": 1, "flop": 1}
                if (impl, tokens) in ended:
                    row |= {"status": "oom", "error": "the child died", "memory_bytes": None}
                else:
                    t = 4 * slow * floor
                    row |= {"median": t, "q25": 0.95 * t, "q75": 1.1 * t, "n": 20, "memory_bytes": slow * tokens * 32}
                rows.append(row)
        self.put(f"attention/{bench}/rows.json", {"format": 1, "kind": "bench-attention", "rows": rows})

    def tables(self):
        collect.write(collect.collect(self.paths), self.folder)
        return records.load_tables(self.folder)


def fill(store):
    """Something of everything: failures, a missing seed, a user's own system, two models, one whole-graph run."""
    for seed in range(3):
        for system in TEST:
            if (system, seed) == ("my-attention", 2):
                continue  # never run
            status = "timeout" if (system, seed) == ("gp-raw", 1) else "oom" if system == "gp-flash" else "ok"
            store.run("subset-2k", system, seed, status)
            if system not in ("gp-raw", "gp-flash", "my-attention"):
                store.run("subset-16k", system, seed, tokens=16384)
    store.run("subset-16k", "gp-raw", 0, "oom", tokens=16384, history=[])
    for system in ("torchgt", "sage", "mlp", "random-blocks"):
        store.run("whole", system, 0, tokens=117659)
    for model in ("graphormer-slim", "gt"):
        for system in STEPS:
            store.bench(system, model)
    store.attention("length", [(n, 8, 8) for n in LENGTHS], ended=[("scatter", 117659)])
    store.attention("width", [(16384, *shape) for shape in ((3, 5), (8, 8), (32, 24))])
    return store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return fill(Store(tmp_path_factory.mktemp("full")))


@pytest.fixture(scope="module")
def tables(full):
    return full.tables()


@pytest.fixture(scope="module")
def drawn(tables):
    return {name: module.draw(tables) for name, module in FIGURES.items()}


# Collecting -----------------------------------------------------------------------------------------------------------


def test_collect_makes_one_row_a_run_an_epoch_and_a_timed_step(tables):
    assert len(tables.runs) == 26 + 19 + 4
    run = tables.runs.query("group == 'subset-16k' and system == 'torchgt' and seed == 1").iloc[0]
    assert run["lr"] == 0.005 and run["dropout"] == 0.1 and run["best_epoch"] == 38 and run["seq_len"] == 16384
    epochs = tables.history.query("group == 'subset-16k' and system == 'torchgt' and seed == 1")
    assert epochs["seconds"].iloc[-1] == pytest.approx(4.0) and epochs["wall_s"].iloc[0] == pytest.approx(1.1)
    steps = tables.scaling.query("model == 'gt' and system == 'torchgt' and seq_len == 1024")
    assert list(steps["kind"]) == ["dense", "sparse"]
    assert records.amortised_columns(steps) == {5: "amortised_5", 10: "amortised_10", 50: "amortised_50"}


def test_collect_does_not_depend_on_the_order_of_records(full):
    first = collect.collect(full.paths)
    second = collect.collect(full.paths[::-1])
    for name in records.SCHEMAS:
        pd.testing.assert_frame_equal(getattr(first, name), getattr(second, name))


def test_csv_and_parquet_hold_the_same(full, tables):
    for name in records.SCHEMAS:
        parquet = records.conform(pd.read_parquet(full.folder / f"{name}.parquet"), name)
        pd.testing.assert_frame_equal(getattr(tables, name), parquet, check_dtype=False)


def test_a_record_of_a_run_that_died_early_is_a_row(store):
    store.put(
        "runs/g/gt/sage/seed-4/record.json",
        {"format": 1, "status": "oom", "error": "killed", "system": "sage", "model": "gt", "seed": 4, "time": None},
    )
    run = store.tables().runs.iloc[0]
    assert (run["group"], run["seed"], run["status"]) == ("g", 4, "oom")
    assert pd.isna(run["test"]) and pd.isna(run["machine_id"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"format": 2, "status": "ok"}', "format 2; this version reads 1"),
        ("[1]", "format 'list'"),
        ('{"format": 1', "not valid JSON"),
        ('{"format": 1, "status": "fine"}', "status 'fine'; allowed: ok"),
    ],
)
def test_a_record_that_cannot_be_understood_stops_the_collection(tmp_path, capsys, content, said):
    path = tmp_path / "record.json"
    path.write_text(content)
    (tmp_path / "list.txt").write_text(f"{path}\n")
    code = collect.main(["--out", str(tmp_path / "tables"), "--records-file", str(tmp_path / "list.txt")])
    error = capsys.readouterr().err
    assert code == 2 and said in error and str(path) in error and error.count("\n") == 1
    assert not (tmp_path / "tables").exists()


def test_machine_id_agrees_exactly_where_a_ratio_is_allowed():
    assert collect.machine_id(MACHINE) == collect.machine_id(dict(reversed(MACHINE.items())))
    assert collect.machine_id(MACHINE) != collect.machine_id(MACHINE | {"threads": 4})


# Reading and comparing ------------------------------------------------------------------------------------------------


def test_load_tables_names_what_is_missing(store):
    store.run("g", "sage", 0)
    store.tables()
    path = store.folder / "runs.csv"
    pd.read_csv(path).drop(columns="status").to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"runs\.csv: no column 'status'"):
        records.load_tables(store.folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"runs\.csv: no such table"):
        records.load_tables(store.folder)


def test_summary_has_the_sample_deviation_and_counts_lost_seeds(tables):
    summary = records.summarise_runs(tables.runs).set_index(["group", "system"])
    runs = tables.runs.query("group == 'subset-2k' and system == 'sage'")
    row = summary.loc[("subset-2k", "sage")]
    assert row["n"] == 3 and row["std"] == pytest.approx(np.std(runs["test"], ddof=1))
    raw = summary.loc[("subset-2k", "gp-raw")]
    assert (raw["n"], raw["expected"], raw["failures"]) == (2, 3, "1 time")
    assert summary.loc[("subset-2k", "my-attention"), "failures"] == "1 missing"
    flash = summary.loc[("subset-2k", "gp-flash")]
    assert flash["n"] == 0 and math.isnan(flash["mean"]) and flash["failures"] == "3 memory"
    assert math.isnan(summary.loc[("whole", "torchgt"), "std"])


def test_ratio_refuses_another_class_of_machine_or_length(store):
    store.bench("gp-flash")
    store.bench("sage", machine=OTHER)
    store.bench("gp-sparse")
    steps = store.tables().scaling
    base, sage, sparse = (
        steps[(steps["system"] == s) & (steps["seq_len"] == 4096)].iloc[0] for s in ("gp-flash", "sage", "gp-sparse")
    )
    assert records.ratio(base, sparse) == pytest.approx(base["step_s"] / sparse["step_s"])
    with pytest.raises(records.MachineMismatch, match="machine_id"):
        records.ratio(base, sage)
    with pytest.raises(records.MachineMismatch, match="seq_len"):
        records.ratio(steps[(steps["system"] == "gp-flash") & (steps["seq_len"] == 2048)].iloc[0], sparse)


def test_ended_keeps_the_first_failure_beyond_the_last_success(store):
    rows = [step_row("sage", 1024), step_row("sage", 2048, status="error"), step_row("sage", 4096)]
    rows += [step_row("sage", 8192, status="oom"), step_row("sage", 16384, status="oom")]
    store.rows("sage", rows)
    assert list(records.ended(store.tables().scaling)["seq_len"]) == [2048, 8192]


# Data behind the figures ----------------------------------------------------------------------------------------------


def test_speedup_is_at_the_longest_gp_flash_length_and_where_most_systems_are(tables):
    data = speedup.frame(tables).query("panel == 'measured' and model == 'gt'")
    assert sorted(data["seq_len"].unique()) == [4096, 16384]
    bars = data[data["seq_len"] == 16384].set_index("label")
    expected = bars.loc["gp-flash", "step_s"] / bars.loc["torchgt, sparse step", "step_s"]
    assert bars.loc["torchgt, sparse step", "speedup"] == pytest.approx(expected)
    assert bars.loc["gp-flash", "speedup"] == 1.0
    amortised = bars.loc["torchgt, a dense step in 10"]
    assert amortised["speedup"] == pytest.approx(amortised["base_s"] / amortised["step_s"])
    assert bars.loc["gp-raw", "note"] == "memory budget met at 8,192 tokens" and pd.isna(bars.loc["gp-raw", "speedup"])


def test_speedup_gives_no_ratio_across_machines(store):
    for system in ("gp-flash", "torchgt"):
        store.bench(system)
    store.bench("sage", machine=OTHER)
    bars = speedup.frame(store.tables()).query("panel == 'measured'").set_index("label")
    assert pd.isna(bars.loc["sage", "speedup"]) and "another machine" in bars.loc["sage", "note"]
    assert bars.loc["torchgt, sparse step", "speedup"] > 1 and pd.isna(bars.loc["torchgt, sparse step", "note"])
    tables = store.tables()
    assert set(results.longest_speedups(tables.scaling)) == {("graphormer-slim", s) for s in ("gp-flash", "torchgt")}
    steps = results.frame(tables).set_index("label")
    assert steps.loc["sage", ["speedup", "over_sparse"]].isna().all() and steps.loc["sage", "step_s"] > 0


def test_published_values_stay_apart_and_name_their_origin(tables):
    for module in (speedup, sequence_length, accuracy):
        data = module.frame(tables)
        published = data[data["panel"] == "published"]
        assert len(published) and set(data["panel"]) == {"published", "measured"}
        assert published[["gpu", "pattern", "source"]].notna().all(axis=None)
        assert data.loc[data["panel"] == "measured", "source"].isna().all()


def test_published_attention_speedup_is_of_its_own_table(tables):
    data = speedup.frame(tables).query("panel == 'published'").set_index("label")
    assert data.loc["torchgt, 512,000 tokens", "speedup"] == pytest.approx(8027.57 / 77.58)
    assert data.loc["training speed-up", "speedup"] == 62.7


@pytest.mark.parametrize("slope", [1.0, 1.5, 2.0])
def test_fit_finds_the_exponent_of_the_upper_half(slope):
    lengths = pd.Series(LENGTHS)
    values = 0.5 * lengths.astype(float) ** slope
    values[:3] = 7.0  # overhead that must not count
    found, low, high = sequence_length.fit(lengths, values)
    assert found == pytest.approx(slope) and (low, high) == (16384, 117659)
    assert math.isnan(sequence_length.fit(lengths[:2], values[:2])[0])


def test_sequence_length_marks_where_a_budget_ended_a_system(tables):
    data = sequence_length.frame(tables).query("panel == 'measured' and model == 'gt'")
    ends = data[data["status"] != "ok"].drop_duplicates("system").set_index("system")
    assert ends.loc["gp-raw", ["seq_len", "status"]].tolist() == [8192, "oom"]
    assert ends.loc["gp-flash", ["seq_len", "status"]].tolist() == [32768, "timeout"]
    assert set(ends["budget"]) <= {20.0, 6 * 2.0**30} and data.loc[ends.index.size :, "value"].ne(0).all()
    exponents = data[data["quantity"] == "time"].drop_duplicates("label").set_index("label")["exponent"]
    assert exponents["torchgt"] == pytest.approx(1.02) and exponents["gp-flash"] == pytest.approx(1.95)


def test_accuracy_keeps_failed_and_missing_seeds(tables):
    data = accuracy.frame(tables).query("panel == 'measured' and group == 'subset-2k'")
    assert len(data) == 27
    statuses = data.set_index(["system", "seed"])["status"]
    assert statuses["my-attention", 2] == "missing" and statuses["gp-raw", 1] == "timeout"
    assert data["value"].isna().sum() == 5


def test_convergence_starts_after_preprocessing_and_keeps_a_run_without_scores(tables):
    data = convergence.frame(tables).query("group == 'subset-16k'").set_index("system")
    assert data.loc["torchgt", "wall_s"].min() == pytest.approx(1.1)
    assert data.loc["gp-raw", "status"] == "oom" and pd.isna(data.loc["gp-raw", "epoch"])


# Drawing --------------------------------------------------------------------------------------------------------------


def texts(fig):
    """Every word of a figure."""
    import matplotlib.text

    return "\n".join(text.get_text() for text in fig.findobj(matplotlib.text.Text))


@pytest.mark.parametrize("name", ["sequence_length", "convergence"])
def test_a_figure_saved_twice_is_the_same(store, tmp_path, monkeypatch, name):
    monkeypatch.setattr(style, "DPI", 50)
    for system in ("torchgt", "gp-flash"):
        store.run("g", system, 0)
        store.rows(system, [step_row(system, length) for length in LENGTHS[:3]])
    tables = store.tables()
    for folder in ("a", "b"):
        fig, data = FIGURES[name].draw(tables)
        paths = style.save(fig, data, tmp_path / folder / name)
    assert [path.suffix for path in paths] == [".png", ".pdf", ".csv"]
    for path in paths:
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
    assert len(pd.read_csv(paths[-1])) == len(data)


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_of_a_figure_is_clipped(drawn, name):
    check_edges(drawn[name][0])


def check_edges(fig):
    """No panel, with all its words, reaches beyond the page."""
    fig.draw_without_rendering()
    width, height = fig.get_size_inches() * fig.dpi
    for ax in filter(lambda ax: ax.get_visible(), fig.axes):
        box = ax.get_tightbbox()
        assert -1 <= box.x0 and box.x1 <= width + 1 and -1 <= box.y0 and box.y1 <= height + 1, ax.get_title(loc="left")


@pytest.mark.parametrize("name", ["speedup", "accuracy"])
def test_no_text_is_clipped_where_a_figure_has_one_panel(store, name):
    for system in ("torchgt", "gp-flash", "random-blocks"):
        store.bench(system)
        store.run("g", system, 0)
    check_edges(FIGURES[name].draw(store.tables())[0])


@pytest.mark.parametrize("name", FIGURES)
def test_panels_of_a_figure_do_not_overlap(drawn, name):
    fig, _ = drawn[name]
    fig.draw_without_rendering()
    boxes = [ax.get_tightbbox() for ax in fig.axes if ax.get_visible()]
    for index, one in enumerate(boxes):
        for other in boxes[:index]:
            width = min(one.x1, other.x1) - max(one.x0, other.x0)
            height = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert width <= 1 or height <= 1


@pytest.mark.parametrize("name", FIGURES)
def test_figures_explain_themselves_without_data(store, name):
    fig, data = FIGURES[name].draw(store.tables())
    check_edges(fig)
    assert "No " in texts(fig) and set(data.get("panel", [])) <= {"published"}


def test_figures_name_failures(drawn):
    words = {name: texts(fig) for name, (fig, _) in drawn.items()}
    assert "✕ memory budget met at 8,192 tokens" in words["speedup"]
    assert "gp-raw: memory" in words["sequence_length"] and "gp-flash: time" in words["sequence_length"]
    assert "n = 2 of 3\n✕ 1 time" in words["accuracy"] and "n = 0 of 3\n✕ 3 memory" in words["accuracy"]
    assert "mlp\n(control)" in words["accuracy"]
    assert (
        "gp-raw: time (seed 1)" in words["convergence"] and "gp-flash: memory (seeds 0, 1, 2)" in words["convergence"]
    )


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "attention"])  # it knows no systems
def test_figures_draw_when_every_run_failed(store, name):
    failed = {"torchgt": "oom", "gp-flash": "timeout", "gp-raw": "error", "sage": "refused"}
    for system, status in failed.items():
        store.run("g", system, 0, status, history=[])
        store.rows(system, [step_row(system, 1024, status=status)])
    fig, data = FIGURES[name].draw(store.tables())
    fig.draw_without_rendering()
    words = texts(fig)
    if name == "speedup":  # nothing to divide by
        assert "No step of gp-flash was measured" in words
    else:
        assert all(records.REASONS[status] in words for status in failed.values())
        assert set(failed.values()) <= set(data["status"])


def test_figures_draw_a_benchmark_that_never_reached_a_length(store):
    store.bench("gp-flash")
    store.rows("sage", [step_row("sage", None, "graphormer-slim", "refused")], "graphormer-slim")
    tables = store.tables()
    assert "sage: refused" in texts(sequence_length.draw(tables)[0]) and "✕ refused" in texts(speedup.draw(tables)[0])


def test_the_majority_class_is_drawn_where_it_is_known(store):
    record = run_record("g", "sage", 0)
    store.run("g", "sage", 0, metric=record["metric"] | {"majority": 0.1})
    assert "majority class: 10.0" in texts(accuracy.draw(store.tables())[0])


def test_the_artifact_protocol_is_labelled(store):
    store.run("g", "sage", 0, protocol="artifact")
    store.run("g", "sage", 1)
    tables = store.tables()
    words = texts(accuracy.draw(tables)[0])
    assert "(protocol artifact: best epoch on test)" in words and words.count("n = 1") == 2
    assert "protocol artifact" in results.markdown(results.frame(tables), tables)


def test_every_system_has_its_own_colour_and_marker():
    looks = [(own.color, own.marker) for own in style.SYSTEMS.values()]
    assert len({color for color, _ in looks}) == len({marker for _, marker in looks}) == len(looks)
    own = style.palette(["zeta", "torchgt", "alpha"])
    assert own["torchgt"] == style.SYSTEMS["torchgt"] and len({own[name].color for name in own}) == 3
    assert own["alpha"] == style.palette(["alpha", "zeta"])["alpha"]
    assert style.order(["mlp", "zeta", "sage", "torchgt"]) == ["torchgt", "sage", "zeta", "mlp"]


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        (style.seconds, 0.00085, "850 µs"), (style.seconds, 0.0123, "12.3 ms"), (style.seconds, 0.99999, "1.00 s"),
        (style.seconds, 13.04, "13.0 s"), (style.seconds, 750, "12.5 min"), (style.seconds, math.nan, "–"),
        (style.size, 1.5 * 2**30, "1.50 GiB"), (style.size, 2000, "1.95 KiB"), (style.times, 118.4, "118×"),
        (style.times, 0.8712, "0.871×"), (style.times, 9.999, "10.0×"), (style.tokens, 117659, "117,659"),
    ],
)  # fmt: skip
def test_units(text, value, expected):
    assert text(value) == expected


def test_short_drops_only_zeros_behind_the_point():
    found = [style.short(text) for text in ("20.0 s", "0.100×", "100×", "1,000×", "1.50 GiB", "1.00 s", "10.5 ms")]
    assert found == ["20 s", "0.1×", "100×", "1,000×", "1.5 GiB", "1 s", "10.5 ms"]


def test_command_line_of_a_figure(full, tables, tmp_path):
    command = [sys.executable, "-m", "figures.convergence", "--out", str(tmp_path / "f"), "--tables"]
    done = subprocess.run([*command, str(full.folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / f"f.{suffix}").stat().st_size > 1000 for suffix in ("png", "pdf", "csv"))
    bad = subprocess.run([*command, str(tmp_path / "nowhere")], capture_output=True, text=True)
    assert bad.returncode == 2 and "no such table" in bad.stderr and "Traceback" not in bad.stderr


# The results table ----------------------------------------------------------------------------------------------------


def test_results_table_has_a_line_a_system_and_marks_failures(tables):
    text = results.markdown(results.frame(tables), tables)
    line = next(line for line in text.splitlines() if line.startswith("| gp-raw | 6"))
    assert "2 of 3 (✕ 1 time)" in line
    assert "| gp-flash | – | 0 of 3 (✕ 3 memory) |" in text and "mlp (control)" in text
    fast = STEPS["gp-flash"][0] * 16**1.95 / (STEPS["torchgt"][0] * 16**1.02)
    assert f"{style.times(fast)} at 16,384" in text and "Example CPU, 2 threads, torch 2.13.0" in text
    widths = {line.count("|") for line in text.split("\n\n")[1].splitlines()}
    assert len(widths) == 1


def test_results_fill_the_marked_part_of_a_readme(full, tables, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"top\n{results.BEGIN}\nold\n{results.END}\nbottom\n")
    arguments = ["--tables", str(full.folder), "--out", str(tmp_path / "out" / "results"), "--readme", str(readme)]
    assert results.main(arguments) == 0
    once = readme.read_text()
    assert (
        once.startswith(f"top\n{results.BEGIN}\n**") and once.endswith(f"{results.END}\nbottom\n") and "old" not in once
    )
    assert results.main(arguments) == 0 and readme.read_text() == once
    assert (tmp_path / "out" / "results.md").read_text().strip() in once
    readme.write_text("no markers")
    assert results.main(arguments) == 2 and readme.read_text() == "no markers"


def test_results_without_runs(store):
    tables = store.tables()
    assert results.markdown(results.frame(tables), tables).startswith("No run was recorded.")


def test_attention_points(tables, drawn):
    fig, data = drawn["attention"]
    assert set(data["bench"]) == {"length", "width"}
    assert set(data["impl"]) == {"cpu", "scatter", "pyg_transformer_conv"}  # a module's name is left out
    ended = data[(data["impl"] == "scatter") & (data["num_tokens"] == 117659)]
    assert ended["median"].isna().all() and (ended["status"] == "oom").all()
    legends = [text.get_text() for part in fig.subfigs for legend in part.legends for text in legend.get_texts()]
    assert any("gather/scatter (memory" in text for text in legends) and legends.count("floor") == 2
    ratio = data[data["phase"] == "total"].set_index(["impl", "num_tokens", "heads"])["median"]
    assert ratio["scatter", 65536, 8] / ratio["cpu", 65536, 8] == pytest.approx(22)


def test_attention_where_every_trial_failed(store):
    store.attention("length", [(n, 8, 8) for n in (1024, 2048)], ended=itertools.product(ALL_IMPLS, (1024, 2048)))
    fig, data = attention.draw(store.tables())
    fig.draw_without_rendering()
    assert (data["status"] == "oom").all() and records.REASONS["oom"] in texts(fig)


def test_attention_without_measurements(store):
    store.run("whole", "mlp", 0)
    fig, data = attention.draw(store.tables())
    assert data.empty and "No attention was measured" in fig.axes[0].texts[0].get_text()
