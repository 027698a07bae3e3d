"""Layouts against vLLM's own writers: what they write of known values, kvlab's formats decode to those values."""

from __future__ import annotations

import pytest
import torch

from kvlab.kv.formats import DeepseekV4Format, Fp8DsMlaFormat, Fp8Format, IndexerFormat, RawFormat

pytestmark = pytest.mark.gpu

BLOCKS, TOKENS, GUARD = 9, 64, 0xA5


@pytest.fixture
def ops():
    return pytest.importorskip("vllm._custom_ops", reason="vLLM 0.33 is not installed")


def known_values(width, tokens=300, seed=0):
    """bf16 values [tokens, width] of sizes that differ by token, and a slot of its own for each token."""
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(tokens, width, device="cuda", generator=generator)
    values *= torch.logspace(-2, 2, tokens, device="cuda").unsqueeze(1)
    slots = torch.randperm(BLOCKS * TOKENS, device="cuda", generator=generator)[:tokens]
    return values.bfloat16(), slots


def packed_cache(num_bytes, padding=0):
    stride = TOKENS * num_bytes + padding
    buffer = torch.full((BLOCKS * stride,), GUARD, dtype=torch.uint8, device="cuda")
    return buffer.as_strided((BLOCKS, TOKENS, num_bytes), (stride, num_bytes, 1))


def decoded_rows(fmt, cache, slots):
    return fmt.decode(cache).flatten(0, 1)[slots]


def assert_one_rounding(decoded, values, tile):
    """Each value within half a step of e4m3 under a scale of at most twice the least one for its tile."""
    tiles, exact = (t.float().unflatten(-1, (-1, tile)) for t in (decoded, values))
    largest = exact.abs().amax(-1, keepdim=True)
    assert ((tiles - exact).abs() <= exact.abs() * 2**-4 + largest * 2 / 448 * 2**-10).all()


def assert_mostly_the_same_bytes(fmt, cache, values, slots):
    """kvlab's encoder agrees with the writer but for what rounds at a power of two."""
    fields, encoded = fmt.fields(cache), fmt.encode_fields(values.float())
    for name, field in fields.items():
        assert (field.flatten(0, 1)[slots] == encoded[name]).float().mean() > 0.999, name


def test_fp8_ds_mla(ops):
    values, slots = known_values(576)
    cache = packed_cache(656)
    scale = torch.ones((), device="cuda")
    ops.concat_and_cache_mla(values[:, :512], values[:, 512:], cache, slots, "fp8_ds_mla", scale)
    decoded = decoded_rows(Fp8DsMlaFormat(), cache, slots)
    assert_one_rounding(decoded[:, :512], values[:, :512], 128)
    assert torch.equal(decoded[:, 512:], values[:, 512:].float())


def test_indexer(ops):
    values, slots = known_values(128)
    cache = packed_cache(132)
    ops.indexer_k_quant_and_cache(values, cache, slots, 128, "ue8m0")
    assert_one_rounding(decoded_rows(IndexerFormat(), cache, slots), values, 128)
    assert_mostly_the_same_bytes(IndexerFormat(), cache, values, slots)


def test_deepseek_v4():
    reason = "vLLM 0.33 is not installed"
    writers = pytest.importorskip("vllm.models.deepseek_v4.common.ops.cache_utils", reason=reason)
    values, slots = known_values(512)
    cache = packed_cache(584, padding=576)
    writers.quantize_and_insert_k_cache(values, cache, slots, TOKENS)
    decoded = decoded_rows(DeepseekV4Format(), cache, slots)
    assert_one_rounding(decoded[:, :448], values[:, :448], 64)
    assert torch.equal(decoded[:, 448:], values[:, 448:].float())
    assert_mostly_the_same_bytes(DeepseekV4Format(), cache, values, slots)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_flash(ops, dtype, scale):
    heads, width = 4, 128
    values, slots = known_values(2 * heads * width)
    key, value = values.view(-1, 2, heads, width).unbind(1)
    fmt = RawFormat(torch.bfloat16) if dtype == "auto" else Fp8Format(torch.float8_e4m3fn, scale)
    stored = torch.bfloat16 if dtype == "auto" else torch.uint8
    # K and V of a row side by side, heads before tokens.
    cache = torch.zeros(BLOCKS, heads, TOKENS, 2 * width, dtype=stored, device="cuda")
    halves = cache.transpose(1, 2).split(width, -1)
    scales = torch.full((), scale, device="cuda")
    ops.reshape_and_cache_flash(key, value, *halves, slots, dtype, scales, scales)
    rows = fmt.decode(cache).transpose(1, 2).flatten(0, 1)[slots]
    exact = torch.cat([key, value], -1).float()
    if dtype == "auto":
        assert torch.equal(rows, exact)
    else:
        limit = 448 * scale
        wanted = exact.clamp(-limit, limit)
        assert ((rows - wanted).abs() <= wanted.abs() * 2**-4 + scale * 2**-10).all()
