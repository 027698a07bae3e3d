"""The kernels compile for a Hopper GPU, which takes none, and write whole words."""

from __future__ import annotations

import os
import re

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled"),
]

POINTERS = {"keys": "*i64", "starts": "*i64", "blocks": "*i32", "runs": "*i64", "zero_tokens": "*u8"}
NUMBERS = {"block_stride": "i64", "length": "i32", "num_runs": "i32", "tokens": "i32", "token_length": "i32"}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """PTX of a kernel for sm_90, by its arguments' types and its constants."""
    pytest.importorskip("triton", reason="Triton is not installed; its kernels are tested where it is")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def ptx(kernel, types, constants):
        names = [parameter.name for parameter in kernel.params]
        types = {**POINTERS, **NUMBERS, "spread": "fp32", **types, **dict.fromkeys(constants, "constexpr")}
        types = {name: types[name] for name in names}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if types[name].startswith("*") or name in ("tokens",)
        }
        source = ASTSource(kernel, types, constants, aligned)
        binary = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        assert len(binary.asm["cubin"]) > 1000
        return binary.asm["ptx"]

    return ptx


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
        ptx = compiled(fill_runs, {"cache": pointer}, constants)
        assert f"st.global.{store}" in ptx
        assert ("cos.approx" in ptx) == (kind != "zeros")


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", ["Fp8DsMlaFormat", "DeepseekV4Format", "IndexerFormat"])
def test_packed_values(compiled, name, zero):
    from kvlab.kv import launches

    layout = next(layout for fmt, layout in launches._PACKED.items() if fmt.__name__ == name)
    types = {"cache": "*u8", "cache_as_float": "*fp32", "cache_as_bf16": "*bf16"}
    constants = {**layout, "HAS_ZERO": zero, "TOKENS": 4096 // layout["TILE"], "FAST": True}
    ptx = compiled(launches.fill_packed, types, constants)
    assert len(re.findall(r"st\.global\.v2\.b32", ptx)) >= 4 * layout["TILES"]
    assert ("st.global.v4.b32" in ptx) == bool(layout["ROPE"])
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
