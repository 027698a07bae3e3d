"""Which format a cache has: from what its spec says, checked against its shape, and never a guess."""

from __future__ import annotations

import enum

import pytest
import torch

from kvlab.errors import FormatError
from kvlab.kv.detect import FP8_DTYPES, RAW_DTYPES, format_of
from kvlab.kv.formats import (
    DeepseekV4Format,
    Fp8DsMlaFormat,
    Fp8Format,
    IndexerFormat,
    PerTokenHeadFormat,
    RawFormat,
)

from standins import CircularBufferSpec, FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec


class KVQuantMode(enum.IntEnum):
    """vLLM's, as far as it is told apart here."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5
    TURBOQUANT_K8V4 = 6
    NVFP4_DS_MLA = 10
    ULTRAQUANT_4BIT = 11


class SparseCacheRole(str, enum.Enum):  # noqa: UP042
    SPARSE = "sparse"
    INDEXER = "indexer"


E4M3, E5M2, U8, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8


def full(**said):
    return FullAttentionSpec(block_size=16, **said)


def mla(**said):
    return MLAAttentionSpec(block_size=64, **said)


@pytest.mark.parametrize(
    ("spec", "dtype", "width", "cache_dtype", "wanted"),
    [
        *(
            (spec, dtype, 7, None, RawFormat(dtype))
            for dtype in RAW_DTYPES
            for spec in (full(), MambaSpec(block_size=1))
        ),
        (CircularBufferSpec(block_size=4), torch.float32, 7, None, RawFormat(torch.float32)),
        (full(kv_quant_mode=KVQuantMode.NONE), torch.bfloat16, 8, "auto", RawFormat(torch.bfloat16)),
        *((full(), dtype, 8, None, Fp8Format(dtype)) for dtype in FP8_DTYPES),
        (full(), U8, 8, "fp8", Fp8Format(E4M3)),
        (full(), I8, 8, "fp8_e4m3", Fp8Format(E4M3)),
        (full(), U8, 8, "fp8_e5m2", Fp8Format(E5M2)),
        (full(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), U8, 8, "fp8_e5m2", Fp8Format(E5M2)),
        (full(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), U8, 8, "fp8", Fp8Format(E4M3)),
        (mla(cache_dtype_str="fp8"), U8, 576, None, Fp8Format(E4M3)),
        (full(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD), I8, 136, None, PerTokenHeadFormat(I8)),
        (full(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD), U8, 136, None, PerTokenHeadFormat(I8)),
        (full(), U8, 136, "int8_per_token_head", PerTokenHeadFormat(I8)),
        (full(kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD), U8, 136, None, PerTokenHeadFormat(E4M3)),
        (full(kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD), E4M3, 136, None, PerTokenHeadFormat(E4M3)),
        (full(), E4M3, 136, "fp8_per_token_head", PerTokenHeadFormat(E4M3)),
        (mla(cache_dtype_str="fp8_ds_mla"), U8, 656, None, Fp8DsMlaFormat()),
        (mla(), U8, 656, "fp8_ds_mla", Fp8DsMlaFormat()),
        (mla(cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4"), U8, 584, None, DeepseekV4Format()),
        (
            SlidingWindowMLASpec(
                block_size=64, sliding_window=128, cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4"
            ),
            U8,
            584,
            None,
            DeepseekV4Format(),
        ),
        (mla(cache_role=SparseCacheRole.INDEXER), U8, 132, None, IndexerFormat()),
        (mla(cache_role="indexer", cache_dtype_str="fp8_ds_mla"), U8, 132, None, IndexerFormat()),
        (mla(cache_role=SparseCacheRole.SPARSE, cache_dtype_str="fp8_ds_mla"), U8, 656, None, Fp8DsMlaFormat()),
    ],
)
def test_known_formats(spec, dtype, width, cache_dtype, wanted):
    found = format_of(spec, torch.empty(4, 16, width, dtype=dtype), "model.3", cache_dtype)
    assert found == wanted
    assert found.name == wanted.name


@pytest.mark.parametrize(
    ("spec", "dtype", "width", "cache_dtype"),
    [
        # Nothing says what the bytes are.
        (full(), U8, 8, None),
        (full(), I8, 8, "auto"),
        (full(), torch.int32, 8, "fp8"),
        (full(), torch.int64, 8, None),
        (MambaSpec(block_size=1), U8, 8, "fp8"),
        (MambaSpec(block_size=1), E4M3, 8, None),
        (CircularBufferSpec(block_size=4), U8, 8, "fp8_ds_mla"),
        # Bit fields that only the model's own writer fills.
        (full(kv_quant_mode=KVQuantMode.INT4_PER_TOKEN_HEAD), U8, 136, None),
        (full(kv_quant_mode=KVQuantMode.NVFP4), U8, 136, "nvfp4"),
        (full(kv_quant_mode=KVQuantMode.TURBOQUANT_K8V4), U8, 136, "turboquant_k8v4"),
        (full(kv_quant_mode=KVQuantMode.ULTRAQUANT_4BIT), U8, 136, "ultraquant_4bit"),
        (mla(kv_quant_mode=KVQuantMode.NVFP4_DS_MLA, cache_dtype_str="nvfp4_ds_mla"), U8, 352, None),
        # The words are known, but the width is another layout's.
        (mla(cache_dtype_str="fp8_ds_mla"), U8, 584, None),
        (mla(cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4"), U8, 528, None),
        (mla(cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4"), U8, 656, None),
        (mla(cache_role="indexer"), U8, 68, None),
        (full(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD), U8, 7, None),
    ],
)
def test_what_is_unknown_raises_with_layer_dtype_or_width_and_shape(spec, dtype, width, cache_dtype):
    with pytest.raises(FormatError) as error:
        format_of(spec, torch.empty(4, 16, width, dtype=dtype), "model.3", cache_dtype)
    message = str(error.value)
    assert "'model.3'" in message
    assert str((4, 16, width)) in message
    assert str(dtype) in message or f"not {width}" in message
    assert len(message.splitlines()) == 1
    if "unknown" in message:
        assert type(spec).__name__ in message
        assert "formats=" in message


def test_the_error_repeats_what_the_spec_said():
    spec = mla(
        kv_quant_mode=KVQuantMode.NVFP4_DS_MLA, cache_dtype_str="nvfp4_ds_mla", cache_role=SparseCacheRole.SPARSE
    )
    with pytest.raises(FormatError, match=r"NVFP4_DS_MLA.*nvfp4_ds_mla.*sparse"):
        format_of(spec, torch.empty(4, 16, 352, dtype=U8), "model.3")
