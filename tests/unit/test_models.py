"""Models against their published sizes and against plain dense code written from their definitions."""

import math

import pytest
import torch
import torch.nn.functional as F

import torchgt.models.layers
from torchgt import GT, AttentionPattern, Graph, Graphormer
from torchgt.models import MODEL_NAMES, Batch, ModelConfig, build_model


def config(name="graphormer-slim", **overrides):
    defaults = {"in_features": 6, "num_outputs": 3, "layers": 2, "hidden": 16, "heads": 4, "ffn": 24}
    return ModelConfig.preset(name, **{**defaults, **overrides})


def make(cfg, dtype=torch.float64, seed=0):
    """A model whose every parameter matters: the published initial weights are too small to show a mistake."""
    torch.manual_seed(seed)
    model = build_model(cfg).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def make_batch(cfg, num_nodes=9, num_edges=20, dtype=torch.float64, seed=1, **fields):
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    graph = Graph.from_edge_index(edge_index, num_nodes)
    pattern = AttentionPattern.from_graph(graph, num_global=cfg.num_global, hamiltonian_path=True)
    x = torch.randn(num_nodes, cfg.in_features, dtype=dtype, generator=generator)
    return Batch(**{"x": x, "pattern": pattern, **fields})


SEED = torch.tensor(1234)


# Sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features, classes, expected", [(128, 40, 111_912), (100, 47, 110_575)])
def test_graphormer_slim_has_the_published_number_of_parameters(features, classes, expected):
    # One less than published: the original holds a scalar that its code never uses.
    cfg = ModelConfig.preset("graphormer-slim", in_features=features, num_outputs=classes, type_bias=False)
    assert sum(p.numel() for p in Graphormer(cfg).parameters()) == expected


def test_type_bias_and_more_global_tokens_add_their_rows():
    cfg = ModelConfig.preset("graphormer-slim", in_features=128, num_outputs=40, num_types=6, num_global=3)
    assert sum(p.numel() for p in Graphormer(cfg).parameters()) == 111_912 + 6 * 8 + 2 * 64


def test_gt_sizes():
    cfg = ModelConfig.preset("gt", in_features=10, num_outputs=5, type_bias=False)
    assert (cfg.num_global, cfg.ffn) == (0, 2 * cfg.hidden)
    hidden, ffn = 128, 256
    layer = 4 * hidden * (hidden + 1) + ffn * (hidden + 1) + hidden * (ffn + 1) + 4 * hidden
    readout = 64 * (128 + 1) + 32 * (64 + 1) + 5 * (32 + 1)
    assert sum(p.numel() for p in GT(cfg).parameters()) == 128 * (10 + 1) + 4 * layer + readout


def test_presets_follow_the_paper():
    sizes = {name: ModelConfig.preset(name, in_features=1, num_outputs=1) for name in MODEL_NAMES}
    assert {name: (c.layers, c.hidden, c.heads, c.ffn) for name, c in sizes.items()} == {
        "graphormer-slim": (4, 64, 8, 64),
        "graphormer-large": (12, 768, 32, 768),
        "gt": (4, 128, 8, 256),
    }
    assert {name: type(build_model(config(name))) for name in MODEL_NAMES} == {
        "graphormer-slim": Graphormer,
        "graphormer-large": Graphormer,
        "gt": GT,
    }


@pytest.mark.parametrize("name", ["graphormer-slim", "gt"])
def test_initial_values(name):
    torch.manual_seed(0)
    starts = (0.0, 0.0, -4.0, 0.0, 0.0, -4.0)
    sizes = {"hidden": 128, "ffn": 256, "layers": 4, "num_global": 2}
    cfg = config(name, **sizes, type_bias_init=starts, initialisation="published")
    model = build_model(cfg)
    # GT's readout starts as torch would start it; its scale is checked by the logits below.
    parameters = {n: p for n, p in model.named_parameters() if not n.startswith("readout")}
    weights = torch.cat(
        [p.detach().flatten() for n, p in parameters.items() if n.endswith("weight") and "norm" not in n]
    )
    assert weights.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.02)
    assert weights.mean().abs() < 1e-4
    for parameter_name, parameter in parameters.items():
        if parameter_name.endswith(".bias"):
            assert not parameter.any(), parameter_name
    assert model.type_bias.tolist() == [[start] * cfg.heads for start in starts]
    logits = model(make_batch(cfg, dtype=torch.float32))
    assert 1e-3 < logits.std().item() < 1.0  # neither silent nor confident


@pytest.mark.parametrize("name", ["graphormer-slim", "gt"])
def test_default_initialisation_is_by_fan_in(name):
    model = build_model(config(name, hidden=128, ffn=256))
    weight = model.layers[0].attention.qkv.weight
    assert weight.std().item() == pytest.approx(1 / math.sqrt(3 * 128), rel=0.05)  # uniform in +-1/sqrt(fan in)


# Configuration --------------------------------------------------------------------------------------------------------


def test_unknown_model_names_the_nearest():
    with pytest.raises(ValueError, match="graphormer-slm.*did you mean 'graphormer-slim'.*gt"):
        ModelConfig.preset("graphormer-slm", in_features=1, num_outputs=1)


def test_unknown_option_names_the_nearest():
    with pytest.raises(ValueError, match="droput.*did you mean 'dropout'"):
        config(droput=0.1)


def test_sizes_of_the_data_are_required():
    with pytest.raises(ValueError, match="num_outputs"):
        ModelConfig.preset("gt", in_features=1)


@pytest.mark.parametrize(
    "key, value",
    [
        ("hidden", 18),
        ("heads", 0),
        ("layers", 1.5),
        ("layers", True),
        ("num_global", -1),
        ("dropout", 1.0),
        ("attention_dropout", -0.1),
        ("input_dropout", "0.1"),
        ("type_bias_init", (1.0, 2.0)),
        ("type_bias_init", (0.0,) * 5 + (math.nan,)),
    ],
)
def test_impossible_values_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=key):
        config(**{key: value})


# What the models compute ----------------------------------------------------------------------------------------------


def linear(model, name, x):
    parameters = dict(model.named_parameters())
    return F.linear(x, parameters[f"{name}.weight"], parameters[f"{name}.bias"])


def norm(model, name, x):
    parameters = dict(model.named_parameters())
    return F.layer_norm(x, x.shape[-1:], parameters[f"{name}.weight"], parameters[f"{name}.bias"])


def dense_attention(model, name, x, pattern, type_bias):
    """Masked softmax attention over an [N, N] matrix of scores."""
    cfg = model.config
    q, k, v = linear(model, f"{name}.qkv", x).view(-1, 3, cfg.heads, cfg.head_dim).permute(1, 2, 0, 3)
    rowptr, col, kind, _ = pattern.with_globals_as_pairs()
    row = torch.arange(pattern.num_tokens).repeat_interleave(rowptr.diff())
    scores = torch.full((cfg.heads, len(x), len(x)), -math.inf, dtype=x.dtype)
    scores[:, row, col.long()] = 0.0 if type_bias is None else type_bias[kind.long()].T
    scores = scores + q @ k.transpose(1, 2) / math.sqrt(cfg.head_dim)
    return linear(model, f"{name}.out", (scores.softmax(-1) @ v).permute(1, 0, 2).flatten(1))


def encoded(model, batch):
    x = linear(model, "encoder", batch.x)
    return x if model.global_tokens is None else torch.cat((model.global_tokens, x))


def plain_graphormer(model, batch):
    x = encoded(model, batch)
    for layer in range(model.config.layers):
        name = f"layers.{layer}"
        normed = norm(model, f"{name}.attention_norm", x)
        x = x + dense_attention(model, f"{name}.attention", normed, batch.pattern, model.type_bias)
        inner = F.gelu(linear(model, f"{name}.ffn.inner", norm(model, f"{name}.ffn_norm", x)))
        x = x + linear(model, f"{name}.ffn.outer", inner)
    return linear(model, "head", norm(model, "final_norm", x))[model.config.num_global :]


def plain_gt(model, batch, ffn_reads="residual"):
    x = encoded(model, batch)
    for layer in range(model.config.layers):
        name = f"layers.{layer}"
        branch = dense_attention(model, f"{name}.attention", x, batch.pattern, model.type_bias)
        h = norm(model, f"{name}.attention_norm", x + branch)
        inner = F.relu(linear(model, f"{name}.ffn.inner", h if ffn_reads == "residual" else branch))
        x = norm(model, f"{name}.ffn_norm", h + linear(model, f"{name}.ffn.outer", inner))
    x = F.relu(linear(model, "readout.0", x))
    x = F.relu(linear(model, "readout.2", x))
    return linear(model, "readout.4", x)[model.config.num_global :]


@pytest.mark.parametrize("num_global", [0, 1, 2])
@pytest.mark.parametrize("type_bias", [False, True])
def test_graphormer_equals_its_definition(num_global, type_bias):
    cfg = config(num_global=num_global, type_bias=type_bias)
    model, batch = make(cfg), make_batch(cfg)
    logits = model(batch)
    assert logits.shape == (9, 3)
    torch.testing.assert_close(logits, plain_graphormer(model, batch), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_global, type_bias", [(0, False), (0, True), (2, True)])
def test_gt_equals_its_definition(num_global, type_bias):
    cfg = config("gt", num_global=num_global, type_bias=type_bias)
    model, batch = make(cfg), make_batch(cfg)
    logits = model(batch)
    torch.testing.assert_close(logits, plain_gt(model, batch), rtol=1e-10, atol=1e-10)
    # The mistake that the published code makes would show: its feed-forward network reads the attention branch.
    mistaken = plain_gt(model, batch, ffn_reads="branch")
    assert (logits - mistaken).abs().max() > 0.1 * logits.abs().max()


@pytest.mark.parametrize("name", ["graphormer-slim", "gt"])
def test_feed_forward_works_on_the_residual_when_attention_gives_nothing(name):
    cfg = config(name, num_global=0, layers=1)
    model, batch = make(cfg), make_batch(cfg)
    with torch.no_grad():
        for parameter in model.layers[0].attention.out.parameters():
            parameter.zero_()
    before = model(batch)
    batch.x = batch.x.clone()
    batch.x[0] += 1.0
    after = model(batch)
    # Tokens are then independent, and each still depends on its own features.
    assert not torch.allclose(before[0], after[0])
    assert torch.equal(before[1:], after[1:])
    ffn_weight = model.layers[0].ffn.inner.weight
    (gradient,) = torch.autograd.grad(after.square().sum(), ffn_weight)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["graphormer-slim", "gt"])
def test_every_parameter_gets_a_gradient(name):
    cfg = config(name, num_global=1)
    model = make(cfg)
    model(make_batch(cfg)).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("name", ["graphormer-slim", "gt"])
@pytest.mark.parametrize("num_global", [0, 1])
def test_only_global_tokens_connect_unconnected_nodes(name, num_global):
    cfg = config(name, num_global=num_global)
    model = make(cfg)
    pattern = AttentionPattern.from_graph(Graph.from_edge_index(torch.empty(2, 0).long(), 4), num_global=num_global)
    x = torch.randn(4, cfg.in_features, dtype=torch.float64)
    before = model(Batch(x=x, pattern=pattern))
    x[3] += 1.0
    after = model(Batch(x=x, pattern=pattern))
    assert torch.equal(before[0], after[0]) == (num_global == 0)


@pytest.mark.parametrize("name", ["graphormer-slim", "gt"])
@pytest.mark.parametrize("num_nodes", [0, 1])
def test_tiny_sequences(name, num_nodes):
    cfg = config(name, num_global=1, attention_dropout=0.5)
    model = make(cfg).train()
    batch = make_batch(cfg, num_nodes=max(num_nodes, 1), num_edges=0)
    if num_nodes == 0:
        empty = Graph.from_edge_index(torch.empty(2, 0).long(), 0)
        batch = Batch(x=batch.x[:0], pattern=AttentionPattern.from_graph(empty, num_global=1))
    batch.dropout_seed = SEED
    logits = model(batch)
    assert logits.shape == (num_nodes, 3)
    logits.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_step_without_type_bias_is_a_step_with_a_bias_of_zero():
    cfg = config()
    model, batch = make(cfg), make_batch(cfg)
    biased = model(batch)
    batch.use_type_bias = False
    plain = model(batch)
    plain.sum().backward()
    assert model.type_bias.grad is None
    with torch.no_grad():
        model.type_bias.zero_()
    batch.use_type_bias = True
    torch.testing.assert_close(model(batch), plain)
    assert not torch.allclose(biased, plain)


def test_dense_step_over_all_tokens():
    cfg = config(num_global=1)
    model = make(cfg)
    batch = make_batch(
        cfg, pattern=AttentionPattern.full(torch.tensor([0, 10])), use_type_bias=False, impl="dense", kind="dense"
    )
    model_without_bias = make(config(num_global=1, type_bias=False))
    model_without_bias.load_state_dict({k: v for k, v in model.state_dict().items() if k != "type_bias"})
    torch.testing.assert_close(model(batch), plain_graphormer(model_without_bias, batch), rtol=1e-10, atol=1e-10)


def test_pair_bias_reaches_every_layer():
    cfg = config(num_global=0, type_bias=False)
    model, batch = make(cfg), make_batch(cfg)
    without = model(batch)
    batch.pair_bias = torch.randn(batch.pattern.num_pairs, cfg.heads, dtype=torch.float64, requires_grad=True)
    with_bias = model(batch)
    with_bias.sum().backward()
    assert not torch.allclose(without, with_bias)
    assert batch.pair_bias.grad.any(1).all()


# Dropout --------------------------------------------------------------------------------------------------------------

DROPPING = {"dropout": 0.3, "input_dropout": 0.2, "attention_dropout": 0.4}


@pytest.mark.parametrize("name", ["graphormer-slim", "gt"])
def test_dropout_is_a_function_of_the_seed(name):
    cfg = config(name, **DROPPING)
    model, batch = make(cfg, torch.float32).train(), make_batch(cfg, dtype=torch.float32)
    dropless = model(batch)
    batch.dropout_seed = SEED
    first = model(batch)
    torch.rand(3)  # the state of torch's own generator must not matter
    assert torch.equal(model(batch), first)
    assert not torch.allclose(first, dropless)
    batch.dropout_seed = SEED + 1
    assert not torch.allclose(model(batch), first)
    assert torch.equal(model.eval()(batch), dropless)


@pytest.mark.parametrize("name", ["graphormer-slim", "gt"])
def test_every_dropout_site_has_its_own_seed(name, monkeypatch):
    cfg = config(name, layers=3, **DROPPING)
    seeds, probabilities = [], []
    token_dropout, graph_attention = torchgt.models.layers.token_dropout, torchgt.models.layers.graph_attention

    def watched_dropout(x, p, seed, token_offset=0):
        seeds.append(seed.item())
        probabilities.append(p)
        return token_dropout(x, p, seed, token_offset=token_offset)

    def watched_attention(*args, **keywords):
        seeds.append(keywords["dropout_seed"].item())
        probabilities.append(keywords["dropout_p"])
        return graph_attention(*args, **keywords)

    monkeypatch.setattr(torchgt.models.layers, "token_dropout", watched_dropout)
    monkeypatch.setattr(torchgt.models.layers, "graph_attention", watched_attention)
    make(cfg).train()(make_batch(cfg, dropout_seed=torch.tensor(2**63 - 1)))
    assert probabilities == [0.2] + [0.4, 0.3, 0.3] * 3
    assert len(set(seeds)) == 1 + 3 * 3


@pytest.mark.parametrize("name", ["graphormer-slim", "gt"])
def test_checkpointing_changes_no_bit(name):
    gradients = []
    for checkpointing in (False, True):
        cfg = config(name, num_global=1, activation_checkpointing=checkpointing, **DROPPING)
        model, batch = make(cfg, torch.float32).train(), make_batch(cfg, dtype=torch.float32, dropout_seed=SEED)
        model(batch).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients, strict=True))


# Precision ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["graphormer-slim", "gt"])
def test_autocast_gives_attention_bfloat16(name, monkeypatch):
    cfg = config(name, **DROPPING)
    model, batch = make(cfg, torch.float32).train(), make_batch(cfg, dtype=torch.float32, dropout_seed=SEED)
    exact = model(batch)
    dtypes, graph_attention = set(), torchgt.models.layers.graph_attention

    def watched(query, key, value, pattern, **keywords):
        dtypes.update((query.dtype, key.dtype, value.dtype))
        return graph_attention(query, key, value, pattern, **keywords)

    monkeypatch.setattr(torchgt.models.layers, "graph_attention", watched)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch)
    logits.float().square().sum().backward()
    assert dtypes == {torch.bfloat16}
    assert (logits.float() - exact).norm() < 0.05 * exact.norm()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


# Batches that do not fit ----------------------------------------------------------------------------------------------


def test_batches_that_do_not_fit_are_refused():
    cfg = config()
    model, batch = make(cfg), make_batch(cfg)
    with pytest.raises(ValueError, match="x: expected 6 features, found 5"):
        model(Batch(x=batch.x[:, :5], pattern=batch.pattern))
    with pytest.raises(ValueError, match="pattern"):
        model(Batch(x=batch.x))
    with pytest.raises(ValueError, match="10 tokens, but the batch has 9"):
        model(Batch(x=batch.x[:8], pattern=batch.pattern))
    with pytest.raises(ValueError, match="position 2"):
        model(Batch(x=batch.x, pattern=batch.pattern, token_offset=2))
    with pytest.raises(ValueError, match="y: expected 9 rows"):
        Batch(x=batch.x, y=torch.zeros(8))
    with pytest.raises(ValueError, match="x: expected"):
        Batch(x=batch.x[0])
    with pytest.raises(ValueError, match="kind"):
        Batch(x=batch.x, kind="densely")
