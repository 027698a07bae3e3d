"""Attention kernels of a CPU with AMX: the one that ends the process is not taken, and that is said."""

import pytest

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_no_layer_gets_the_amx_kernel_and_another_choice_stands(monkeypatch, amx, block_size):
    import torch
    from vllm.v1.attention.backends import cpu_attn

    from kvlab.engines.vllm.amx import NOTE, without_amx_attention

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    usual = cpu_attn._get_attn_isa
    planned = usual(torch.bfloat16, block_size, 64)
    with without_amx_attention() as notes:
        chosen = cpu_attn._get_attn_isa(torch.bfloat16, block_size, head_size=64)
    assert chosen == ("vec" if planned == "amx" else planned)
    assert notes == ([NOTE] if planned == "amx" else [])
    assert (planned == "amx") == (amx and block_size % 32 == 0)
    assert cpu_attn._get_attn_isa is usual


def test_the_choice_is_given_back_after_an_error():
    from vllm.v1.attention.backends import cpu_attn

    from kvlab.engines.vllm.amx import without_amx_attention

    usual = cpu_attn._get_attn_isa
    with pytest.raises(RuntimeError), without_amx_attention():
        raise RuntimeError
    assert cpu_attn._get_attn_isa is usual
