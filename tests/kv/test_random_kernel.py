"""The kernels compile for a Hopper GPU, which takes none, and write whole words, a warp adjacent ones.

What Triton makes of a kernel is its own choice, and differs between its versions.
"""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.slow

POINTERS = {"keys": "*i64", "starts": "*i64", "blocks": "*i32", "runs": "*i64", "zero_tokens": "*u8"}
NUMBERS = {"block_stride": "i64", "length": "i32", "num_runs": "i32", "tokens": "i32", "token_length": "i32"}


@pytest.fixture
def compiled(compile_for_hopper):
    """A kernel as PTX and in Triton's last form, by its arguments' types and its constants."""

    def build(kernel, types, constants):
        return compile_for_hopper(kernel, {**POINTERS, **NUMBERS, "spread": "fp32", **types}, constants, ("tokens",))

    return build


def check_layout(ptx, ttgir, paths):
    """Each value is drawn once, by the thread that stores it, and the threads of a warp store in a row."""
    # 32 values a thread, two from each sine and cosine.
    assert ptx.count("cos.approx") == ptx.count("sin.approx") == 16 * paths
    assert not re.search(r"bar\.sync|(ld|st)\.shared|stmatrix", ptx)
    layouts = dict(re.findall(r"(#\w+) = #ttg\.blocked<\{(.*)\}>", ttgir))
    stores = [re.search(r"!tt.ptr<\w+>, (#\w+)>", line)[1] for line in ttgir.splitlines() if " tt.store " in line]
    assert stores
    for store in stores:
        assert re.search(r"threadsPerWarp = \[32(, 1)?\].*order = \[(1, )?0\]", layouts[store])


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    ("pointer", "kind", "store"),
    [
        ("*bf16", "float", "v4.b32"),
        ("*fp16", "float", "v4.b32"),
        ("*fp32", "float", "v4.b32"),
        ("*u8", "e4m3", "v2.b32"),
        ("*bf16", "zeros", "v4.b32"),
    ],
)
def test_plain_values(compiled, pointer, kind, store, zero):
    from kvlab.kv.random_kernel import fill_runs

    # What Triton makes a constant, and what it does not.
    for ones in ({}, {"num_runs": 1, "tokens": 1, "token_length": 1}, dict.fromkeys(NUMBERS, 1)):
        constants = {"KIND": kind, "HAS_ZERO": zero, "GROUPS": 512, "FAST": True, **ones}
        ptx, ttgir = compiled(fill_runs, {"cache": pointer}, constants)
        assert f"st.global.{store}" in ptx
        # A thread stores 4 fp32 values at once: its 8 are exchanged first.
        if pointer != "*fp32":
            check_layout(ptx, ttgir, int(kind != "zeros"))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", ["Fp8DsMlaFormat", "DeepseekV4Format", "IndexerFormat"])
def test_packed_values(compiled, name, zero):
    from kvlab.kv import launches

    layout = next(layout for fmt, layout in launches._PACKED.items() if fmt.__name__ == name)
    types = {"cache": "*u8", "cache_as_float": "*fp32", "cache_as_bf16": "*bf16"}
    for ones in ({}, {"tokens": 1}):
        constants = {**layout, **launches.packed_parts(layout, 64), "HAS_ZERO": zero, "FAST": True, **ones}
        ptx, ttgir = compiled(launches.fill_packed, types, constants)
        # Codes, and in a path of their own bf16 values.
        check_layout(ptx, ttgir, 2 if layout["ROPE"] else 1)
        whole = ptx.count("st.global.v4.b32")
        assert whole == (6 if layout["ROPE"] else 2)
        # Two scales a thread.
        assert ptx.count("st.global") == whole + 2
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
