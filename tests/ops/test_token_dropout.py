"""Dropout over token features: one mask for any split, in C++ and in plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from torchgt.attention import hashing, token_dropout
from torchgt.attention.dropout import token_dropout_torch

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 7, 8, 64, 67])
def test_compiled_and_plain_give_the_same_bits(dtype, channels):
    seed = torch.tensor(2**63 - 1)
    x = torch.randn(501, channels, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    compiled, plain = token_dropout(x, 0.3, seed, 5), token_dropout_torch(x, seed, 0.3, 5)
    assert torch.equal(compiled, plain)
    assert torch.equal(torch.autograd.grad(compiled, x, grad)[0], torch.autograd.grad(plain, x, grad)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_split_gives_the_same_bits(dtype):
    x, seed = torch.randn(100, 24, dtype=dtype), torch.tensor(3)
    whole = token_dropout(x, 0.4, seed)
    parts = [token_dropout(x[a:b], 0.4, seed, token_offset=a) for a, b in ((0, 33), (33, 33), (33, 100))]
    assert torch.equal(torch.cat(parts), whole)


def test_any_thread_count_gives_the_same_bits(threads):
    x, seed = torch.randn(5000, 64), torch.tensor(3)
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(token_dropout(x, 0.4, seed))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_kept_elements_are_scaled_and_dropped_ones_are_zero():
    x = torch.full((400, 64), 3.0)
    out = token_dropout(x, 0.25, torch.tensor(9))
    keep = hashing.keep_tokens(torch.tensor(9), 0, 400, 64, 0.25)
    assert torch.equal(out, torch.where(keep, x / 0.75, 0.0))
    assert abs(float(keep.double().mean()) - 0.75) < 5 * (0.25 * 0.75 / keep.numel()) ** 0.5


def test_dropped_nan_is_zero():
    x = torch.full((50, 16), torch.nan)
    out = token_dropout(x, 0.5, torch.tensor(1))
    keep = hashing.keep_tokens(torch.tensor(1), 0, 50, 16, 0.5)
    assert (out[~keep] == 0).all() and out[keep].isnan().all()


def test_seeds_and_rows_differ():
    x = torch.ones(64, 64)
    masks = [token_dropout(x, 0.5, torch.tensor(seed)) > 0 for seed in range(4)]
    agreement = [float((masks[0] == mask).double().mean()) for mask in masks[1:]]
    assert all(0.4 < share < 0.6 for share in agreement)
    assert len({tuple(row.tolist()) for row in masks[0]}) == 64


def test_off_means_the_tensor_itself():
    x = torch.randn(4, 4)
    assert token_dropout(x, 0.0, None) is x
    assert token_dropout(x, 0.5, None, training=False) is x


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_empty(shape):
    x = torch.randn(shape, requires_grad=True)
    out = token_dropout(x, 0.5, torch.tensor(1))
    out.sum().backward()
    assert out.shape == shape and x.grad.shape == shape


def test_strided_input():
    x = torch.randn(64, 32).t()
    assert torch.equal(token_dropout(x, 0.5, torch.tensor(1)), token_dropout(x.contiguous(), 0.5, torch.tensor(1)))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"p": 1.0}, r"p is 1.0, expected a number in \[0, 1\)"),
        ({"p": "a"}, "p is 'a'"),
        ({"x": torch.zeros(3)}, r"x is torch.float32 \[3\], expected floating point \[N, C\]"),
        ({"x": torch.zeros(3, 3, dtype=torch.int64)}, "x is torch.int64"),
        ({"seed": 5}, "seed is 5, expected an int64 scalar tensor"),
        ({"seed": torch.zeros(2, dtype=torch.int64)}, r"seed is torch.int64 \[2\]"),
    ],
)
def test_refuses(keywords, message):
    arguments = {"x": torch.zeros(3, 3), "p": 0.5, "seed": torch.tensor(1)} | keywords
    with pytest.raises(ValueError, match=message):
        token_dropout(**arguments)
