"""Layer 1: CUDA kernels that write normal values in a cache's own format; imported only where Triton is.

Eight neighbouring values come from one call of Philox4x32-7, counted by their place in the kernel block and by the
block, under the layer's key. Bound by instructions, about 18 a value, so the words' bits become floats without a
conversion, and the standard deviation is folded into the radius. Groups of values are counted in one dimension. Of two,
Triton 3.6 spreads a warp over the outer one, so that it stores in 32 rows at once, and draws all values a second time
in the order that a reduction wants.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

# mypy: disable-error-code="no-untyped-def"


def compiled() -> bool:
    """Whether kernels are compiled rather than interpreted, which knows neither fast functions nor devices."""
    return isinstance(fill_runs, triton.JITFunction)


@triton.jit
def _pair(word, spread, FAST: tl.constexpr):
    """Two normal values from 32 bits: 20 of radius, 12 of angle; `spread` is -2 ln 2 times the variance.

    Where that is 0 they are 0 and not -0, for -0 + 0 is 0; no other value is -0, and the sums are free.
    """
    radius = (((word >> 9) & 0x7FFFF8) | 0x3F800004).to(tl.float32, bitcast=True) - 1.0
    turns = (((word << 11) & 0x7FF800) | 0x3F800400).to(tl.float32, bitcast=True)
    angle = turns * 6.283185307179586 - 9.42477796076938
    if FAST:
        length = tl.sqrt(spread * libdevice.fast_log2f(radius))
        return length * libdevice.fast_cosf(angle) + 0.0, length * libdevice.fast_sinf(angle) + 0.0
    else:
        length = tl.sqrt(spread * tl.log2(radius))
        return length * tl.cos(angle) + 0.0, length * tl.sin(angle) + 0.0


@triton.jit
def _eight(key, place, block, spread, FAST: tl.constexpr):
    """Eight normal values for each place of a block."""
    w0, w1, w2, w3 = tl.philox(key, place.to(tl.uint32), block.to(tl.uint32), 0, 0, n_rounds=7)
    a0, b0 = _pair(w0, spread, FAST)
    a1, b1 = _pair(w1, spread, FAST)
    a2, b2 = _pair(w2, spread, FAST)
    a3, b3 = _pair(w3, spread, FAST)
    return a0, a1, a2, a3, b0, b1, b2, b3


@triton.jit
def _side_by_side(e):
    """The eight as a last dimension, which one thread keeps: [N] each to [N, 8]."""
    low = tl.join(tl.join(e[0], e[4]), tl.join(e[2], e[6]))
    high = tl.join(tl.join(e[1], e[5]), tl.join(e[3], e[7]))
    return tl.reshape(tl.join(low, high), [e[0].shape[0], 8])


@triton.jit
def _both_side_by_side(e, f):
    """Two eights as a last dimension, which one thread keeps: [N] each to [N, 16]."""
    low = tl.join(tl.join(tl.join(e[0], f[0]), tl.join(e[4], f[4])), tl.join(tl.join(e[2], f[2]), tl.join(e[6], f[6])))
    high = tl.join(tl.join(tl.join(e[1], f[1]), tl.join(e[5], f[5])), tl.join(tl.join(e[3], f[3]), tl.join(e[7], f[7])))
    return tl.reshape(tl.join(low, high), [e[0].shape[0], 16])


@triton.jit
def _largest(e):
    """The largest magnitude of the eight."""
    low = tl.maximum(tl.maximum(tl.abs(e[0]), tl.abs(e[1])), tl.maximum(tl.abs(e[2]), tl.abs(e[3])))
    high = tl.maximum(tl.maximum(tl.abs(e[4]), tl.abs(e[5])), tl.maximum(tl.abs(e[6]), tl.abs(e[7])))
    return tl.maximum(low, high)


@triton.jit
def fill_runs(
    cache,
    keys,
    starts,
    blocks,
    runs,
    zero_tokens,
    block_stride,
    length,
    num_runs,
    tokens,
    token_length,
    spread,
    KIND: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    GROUPS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Write plain values, or zero bytes, to the runs of adjacent values that make up each kernel block.

    A program writes GROUPS times 8 values of one run of one block, of the layer `program_id(1)`. Lengths, starts and
    strides count groups of 8 values.

    Args:
        cache: the storage, as elements of the layers' size.
        keys, starts: int64 [layers], of the draws and of block 0.
        blocks: int32, kernel blocks to fill.
        runs: int64 [num_runs], where the runs of a block begin within it.
        zero_tokens: uint8 [kernel blocks of the pool, tokens], nonzero where a token is zero.
        token_length: groups from one token to the next within a run.
        KIND: `float` (the element type of `cache`), `e4m3` (in bytes) or `zeros`.
    """
    layer = tl.program_id(1)
    tiles = tl.cdiv(length, GROUPS)
    run = tl.program_id(0) // tiles % num_runs
    block = tl.load(blocks + tl.program_id(0) // tiles // num_runs)
    group = tl.program_id(0) % tiles * GROUPS + tl.arange(0, GROUPS)
    inside = group < length
    start = tl.load(starts + layer) + tl.load(runs + run) + block.to(tl.int64) * block_stride
    place = ((start + group) * 8)[:, None] + tl.arange(0, 8)[None, :]
    if HAS_ZERO:
        token = block.to(tl.int64) * tokens + group // token_length % tokens
        spread = tl.where(tl.load(zero_tokens + token, mask=inside, other=0) != 0, 0.0, spread)
    if KIND == "zeros":
        values = tl.zeros([GROUPS, 8], tl.float32)
    else:
        values = _side_by_side(_eight(tl.load(keys + layer), run * length + group, block, spread, FAST))
    if KIND == "e4m3":
        tl.store(cache + place, values.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=inside[:, None])
    else:
        tl.store(cache + place, values.to(cache.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _write_tiles(
    cache,
    cache_as_float,
    zero_tokens,
    key,
    block,
    start,
    part,
    tokens,
    spread,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    SCALE_AT: tl.constexpr,
    PLANAR: tl.constexpr,
    UE8M0: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    PART: tl.constexpr,
    FAST: tl.constexpr,
):
    """Write PART tiles of a kernel block, and their scales; a thread has 16 codes, to store them at once."""
    lanes: tl.constexpr = TILE // 16
    lane = tl.arange(0, PART * lanes) % lanes
    item = part * PART + tl.arange(0, PART * lanes) // lanes
    token = item // TILES
    tile = item % TILES
    inside = token < tokens
    place = token * GROUPS + tile * (TILE // 8) + lane * 2
    low = _eight(key, place, block, spread, FAST)
    high = _eight(key, place + 1, block, spread, FAST)
    # The least power of two that brings the largest within 448 = 1.75 * 2^8: a mantissa above 1.75 carries.
    largest = tl.reshape(tl.maximum(_largest(low), _largest(high)), [PART, lanes])
    largest = tl.maximum(tl.max(largest, 1, keep_dims=True), 1e-4)
    largest = tl.reshape(tl.broadcast_to(largest, [PART, lanes]), [PART * lanes])
    exponent = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    if HAS_ZERO:
        zero = tl.load(zero_tokens + token, mask=inside, other=0) != 0
        inverse = tl.where(zero, 0.0, inverse)
        exponent = tl.where(zero, 0, exponent)
    # A zero token's -0 and 0 add up to 0.
    codes = (_both_side_by_side(low, high) * inverse[:, None] + 0.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    at = (start + (token * ROW + tile * TILE + lane * 16))[:, None] + tl.arange(0, 16)[None, :]
    tl.store(cache + at, codes, mask=inside[:, None])
    scale_row = start + SCALE_AT + token * SCALE_ROW
    if PLANAR:
        scale_row += tokens * ROW
    if UE8M0:
        # The byte after a token's last is written by a thread of its last tile that has none.
        byte = tl.where(lane == 0, exponent, 0).to(tl.uint8)
        mask = inside & ((lane == 0) | (tile + lane == TILES))
        tl.store(cache + scale_row + tl.where(lane == 0, tile, TILES), byte, mask=mask)
    else:
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        tl.store(cache_as_float + scale_row // 4 + tile, scale, mask=inside & (lane == 0))


@triton.jit
def _write_rope(
    cache,
    zero_tokens,
    key,
    block,
    start,
    part,
    tokens,
    spread,
    ROPE: tl.constexpr,
    BEFORE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROW: tl.constexpr,
    ROPE_AT: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    PART: tl.constexpr,
    FAST: tl.constexpr,
):
    """Write the bf16 values of PART tokens of a kernel block, counted after the BEFORE groups of their codes."""
    lanes: tl.constexpr = ROPE // 8
    lane = tl.arange(0, PART * lanes) % lanes
    token = part * PART + tl.arange(0, PART * lanes) // lanes
    inside = token < tokens
    if HAS_ZERO:
        spread = tl.where(tl.load(zero_tokens + token, mask=inside, other=0) != 0, 0.0, spread)
    values = _side_by_side(_eight(key, token * GROUPS + BEFORE + lane, block, spread, FAST))
    at = (start // 2 + (token * (ROW // 2) + ROPE_AT // 2 + lane * 8))[:, None] + tl.arange(0, 8)[None, :]
    tl.store(cache + at, values.to(tl.bfloat16), mask=inside[:, None])


@triton.jit
def fill_packed(
    cache,
    cache_as_float,
    cache_as_bf16,
    keys,
    starts,
    blocks,
    zero_tokens,
    block_stride,
    tokens,
    spread,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    ROPE: tl.constexpr,
    ROW: tl.constexpr,
    ROPE_AT: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    SCALE_AT: tl.constexpr,
    PLANAR: tl.constexpr,
    UE8M0: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    TILE_PART: tl.constexpr,
    ROPE_PART: tl.constexpr,
    FAST: tl.constexpr,
):
    """Write tokens of scaled e4m3 tiles and uncoded bf16 values, as `kvlab.kv.codecs.encode_tiles` encodes them.

    A program writes TILE_PART tiles of one kernel block of the layer `program_id(1)`, or the bf16 values of ROPE_PART
    tokens: short code, whatever a token holds. Starts and strides count 16 bytes.

    Args:
        cache, cache_as_float, cache_as_bf16: the storage as bytes, fp32 and bf16.
        keys, starts, blocks, zero_tokens: as for `fill_runs`.
        tokens: tokens of a kernel block.
        TILES, TILE: tiles a token, and codes a tile.
        ROPE: bf16 values a token, at byte ROPE_AT of its row of ROW bytes.
        SCALE_ROW, SCALE_AT: bytes from one token's scales to the next, and where the first stand: in a PLANAR block
            after the last row, else in the block.
        UE8M0: scales of one byte, a zero byte after a token's last; else fp32.
    """
    tile_parts = tl.cdiv(tokens * TILES, TILE_PART)
    parts = tile_parts
    if ROPE > 0:
        parts += tl.cdiv(tokens, ROPE_PART)
    block = tl.load(blocks + tl.program_id(0) // parts)
    part = tl.program_id(0) % parts
    key = tl.load(keys + tl.program_id(1))
    start = (tl.load(starts + tl.program_id(1)) + block.to(tl.int64) * block_stride) * 16
    zero_tokens += block.to(tl.int64) * tokens
    codes: tl.constexpr = TILES * (TILE // 8)
    groups: tl.constexpr = codes + ROPE // 8
    if part < tile_parts:
        _write_tiles(
            cache,
            cache_as_float,
            zero_tokens,
            key,
            block,
            start,
            part,
            tokens,
            spread,
            TILES,
            TILE,
            groups,
            ROW,
            SCALE_ROW,
            SCALE_AT,
            PLANAR,
            UE8M0,
            HAS_ZERO,
            TILE_PART,
            FAST,
        )
    elif ROPE > 0:
        _write_rope(
            cache_as_bf16,
            zero_tokens,
            key,
            block,
            start,
            part - tile_parts,
            tokens,
            spread,
            ROPE,
            codes,
            groups,
            ROW,
            ROPE_AT,
            HAS_ZERO,
            ROPE_PART,
            FAST,
        )
