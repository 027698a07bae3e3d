"""Tokens written through pages are read back from the same places, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.engines.reference.paging import PackedPages, RawPages, as_words, open_pages
from kvlab.engines.reference.specs import FullAttentionSpec, MLAAttentionSpec
from kvlab.errors import FormatError

BLOCKS = 9


def layer(kind: str, kernel_blocks: int = 1):
    """(spec, tensor, values a token) of one cache."""
    if kind == "dense":
        spec = FullAttentionSpec(12, num_kv_heads=3, head_size=4, dtype=torch.bfloat16, kernel_blocks=kernel_blocks)
        return spec, torch.zeros(BLOCKS * kernel_blocks, 3, 12 // kernel_blocks, 8, dtype=torch.bfloat16), 8
    if kind == "latent":
        spec = MLAAttentionSpec(12, head_size=576, dtype=torch.bfloat16)
        return spec, torch.zeros(BLOCKS, 12, 576, dtype=torch.bfloat16), 576
    if kind == "packed":
        spec = MLAAttentionSpec(12, head_size=656, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla")
        return spec, torch.zeros(BLOCKS, 12, 656, dtype=torch.uint8), 576
    spec = MLAAttentionSpec(12, head_size=132, dtype=torch.uint8, cache_role="indexer")
    # Blocks stand apart, as beside the pages of other layers.
    raw = torch.zeros(BLOCKS * 12 * 140, dtype=torch.uint8)
    return spec, raw.as_strided((BLOCKS, 12, 132), (12 * 140, 132, 1)), 128


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(("dense", "latent", "packed", "index")),
    st.sampled_from((1, 2, 3)),
    st.sets(st.integers(12, BLOCKS * 12 - 1), min_size=1, max_size=20),
    st.integers(0, 99),
)
def test_tokens_go_to_their_slots_and_come_back(kind, kernel_blocks, places, seed):
    spec, tensor, width = layer(kind, kernel_blocks)
    pages = open_pages(tensor, spec, "layer")
    assert isinstance(pages, PackedPages if kind in ("packed", "index") else RawPages)
    places = torch.tensor(sorted(places))
    heads = (3,) if kind == "dense" else ()
    values = torch.randn(*heads, len(places), width, generator=torch.Generator().manual_seed(seed))
    pages.write(pages.locate(places // 12, places % 12), values)
    # Read through the format's own view of whole blocks.
    rows = spec_format(spec, tensor).decode(tensor)
    if kind == "dense":
        rows = rows.unflatten(0, (BLOCKS, kernel_blocks)).permute(2, 0, 1, 3, 4).reshape(3, BLOCKS * 12, width)
    else:
        rows = rows.reshape(BLOCKS * 12, width)
    torch.testing.assert_close(rows[..., places, :], values, rtol=0.08, atol=0.02)
    others = torch.ones(BLOCKS * 12, dtype=torch.bool)
    others[places] = False
    assert not rows[..., others, :].any()
    # A request whose context is a shuffle of those places.
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
    shuffled = places[order].unsqueeze(0)
    found = pages.read(pages.locate(shuffled // 12, shuffled % 12), torch.float32)
    assert torch.equal(found[0], rows[..., places[order], :])


def spec_format(spec, tensor):
    from kvlab.kv.detect import format_of

    return format_of(spec, tensor)


def test_words_are_as_wide_as_strides_and_offset_allow():
    raw = torch.arange(256, dtype=torch.uint8)
    for shape, strides, offset, dtype in (
        ((4, 16), (32, 1), 8, torch.int64),
        ((4, 16), (36, 1), 8, torch.int32),
        ((4, 16), (32, 1), 6, torch.int16),
        ((4, 16), (32, 1), 7, torch.uint8),
        ((4, 4), (32, 1), 8, torch.int32),
        ((4, 3), (32, 1), 8, torch.uint8),
    ):
        field = raw.as_strided(shape, strides, offset)
        words = as_words(field)
        assert words.dtype == dtype
        assert torch.equal(words.contiguous().view(torch.uint8), field)


def test_an_unknown_format_is_refused():
    spec = MLAAttentionSpec(12, head_size=40, dtype=torch.uint8)
    with pytest.raises(FormatError, match="layer 'x'"):
        open_pages(torch.zeros(BLOCKS, 12, 40, dtype=torch.uint8), spec, "x")
