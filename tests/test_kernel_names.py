"""Names as profilers give them: short, telling, stable, and in the right role."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvlab.kernel_names import OTHER, ROLES, RULES, SELECTION, role_of, short_name

# Full names are symbols of vLLM 0.33's libraries, of PyTorch, cuBLAS and NCCL; `...` stands for parameters left out.
FA3 = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90"
    "<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, cute::tuple<cute::C<64>, cute::C<64>, cute::C<64> >, 512,"
    " cutlass::half_t, float, cutlass::arch::Sm90, false, true, true> > > >(...)"
)
FA3_MANGLED = (
    "_ZN7cutlass13device_kernelIN5flash20enable_sm90_or_laterINS1_16FlashAttnFwdSm90INS1_25CollectiveMainloopFwdSm90ILi2E"
    "N4cute5tupleIJNS5_1CILi1EEES8_S8_EEENS6_IJNS7_ILi64EEENS7_ILi192EEESA_EEELi64ENS_10bfloat16_tEfNS_4arch4Sm90E"
)
GROUPED = (
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 4096u, 7168u, 1u, 128u, 128u, 128u, 128u, 128u,"
    " 128u, 5u, 128u, 256u, 1u, false, 132u, (deep_gemm::GemmType)1, deep_gemm::epilogue::transform::EpilogueIdentity>"
    "(float*, int*, unsigned int, unsigned int, unsigned int, CUtensorMap_st)"
)
COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda"
    "(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#12}::operator()() const::{lambda"
    "(c10::BFloat16)#1}>(at::TensorIteratorBase&, ...)::{lambda(int)#1}>(int, ...)"
)
NAMES = [
    (
        "void vllm::topKPerRowPrefill<512, true>(float const*, int const*, int const*, int*, int, int, int, int)",
        "topKPerRowPrefill",
        "top-k",
    ),
    ("void vllm::topKPerRowDecode<512, true, true, false>(float const*, ...)", "topKPerRowDecode", "top-k"),
    (
        "void vllm::cooperative::cooperative_topk_cs8<512u>(vllm::cooperative::CooperativeTopKParams<512u>)",
        "cooperative_topk_cs8",
        "top-k",
    ),
    (
        "void vllm::persistent::persistent_topk_kernel<512, 1u>(vllm::persistent::PersistentTopKParams)",
        "persistent_topk_kernel",
        "top-k",
    ),
    ("void vllm::sampled_topk::sampled_topk_kernel<512>(float const*, ...)", "sampled_topk_kernel", "top-k"),
    (
        "_ZN16topk_select_fp32L11topk_kernelINS_20TopkSelectKernelFP32I16TopkSelectConfigIfiLb0ELb0ELb0ELj1024ELj512EEEEE",
        "topk_select_fp32.topk_kernel",
        "top-k",
    ),
    (
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(at::cuda::detail::TensorInfo<float const,"
        " unsigned int>, unsigned int, unsigned int, bool, unsigned int)",
        "gatherTopK",
        "top-k",
    ),
    ("void at::native::mbtopk::radixFindKthValues<float, unsigned int>(...)", "radixFindKthValues", "top-k"),
    (
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int, int>(...)",
        "DeviceRadixSortOnesweepKernel",
        "top-k",
    ),
    (
        "void deep_gemm::sm90_fp8_mqa_logits<64u, 128u, true>(unsigned int, ...)",
        "sm90_fp8_mqa_logits",
        "indexer scores",
    ),
    (
        "void deep_gemm::sm90_fp8_paged_mqa_logits<1u, 64u>(unsigned int, ...)",
        "sm90_fp8_paged_mqa_logits",
        "indexer scores",
    ),
    ("void deep_gemm::sm90_paged_mqa_logits_metadata<32u>(...)", "sm90_paged_mqa_logits_metadata", "indexer scores"),
    ("_convert_req_index_to_global_index_kernel", "_convert_req_index_to_global_index_kernel", "gather/remap"),
    ("_compute_global_topk_indices_and_lens_kernel", "_compute_global_topk_indices_and_lens_kernel", "gather/remap"),
    (
        "void vllm::cp_gather_indexer_k_quant_cache_kernel<1>(char const*, char*, char*, int const*, ...)",
        "cp_gather_indexer_k_quant_cache_kernel",
        "gather/remap",
    ),
    (
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_kernel_impl<"
        "at::native::OpaqueType<2> >(at::TensorIteratorBase&, ...)::{lambda(char*, char const*, long)#1}>(...)>(...)",
        "index_elementwise_kernel[index_kernel_impl]",
        "gather/remap",
    ),
    (
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_put_"
        "kernel_impl<at::native::OpaqueType<2> >(at::TensorIterator&, ...)::{lambda(char*, long)#1}>(...)>(...)",
        "index_elementwise_kernel[index_put_kernel_impl]",
        "cache write",
    ),
    (FA3, "FlashAttnFwdSm90", "attention"),
    (FA3_MANGLED, "FlashAttnFwdSm90", "attention"),
    (
        "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<16>, cute::C<64> >, 4, 256>>(...)",
        "FlashAttnFwdCombine",
        "attention",
    ),
    (
        "_ZN5flash24flash_fwd_splitkv_kernelI23Flash_fwd_kernel_traitsILi128ELi64ELi64ELi4ELb0ELb0EN7cutlass6half_tEEE",
        "flash_fwd_splitkv_kernel",
        "attention",
    ),
    (
        "void legacy::sm90::decode::sparse::flash_fwd_splitkv_mla_fp8_sparse_kernel<legacy::sm90::decode::sparse::"
        "KernelTemplate<(ModelType)0, 64> >(...)",
        "flash_fwd_splitkv_mla_fp8_sparse_kernel",
        "attention",
    ),
    (
        "void legacy::sm90::prefill::sparse_fwd::sparse_attn_fwd_kernel<legacy::sm90::prefill::sparse_fwd::"
        "KernelTemplate<512, true> >(...)",
        "sparse_attn_fwd_kernel",
        "attention",
    ),
    (
        "legacy::smxx::decode::get_mla_metadata_kernel(GetDecodeSchedMetaParams)",
        "get_mla_metadata_kernel",
        "attention",
    ),
    ("_fwd_grouped_kernel_stage1", "_fwd_grouped_kernel_stage1", "attention"),
    ("kernel_unified_attention", "kernel_unified_attention", "attention"),
    ("void vllm::merge_attn_states_kernel<float, float, 128u, false>(...)", "merge_attn_states_kernel", "attention"),
    (GROUPED, "sm90_fp8_gemm_1d2d_impl[MGroupedContiguous]", "MoE"),
    (GROUPED.replace("GemmType)1", "GemmType)0"), "sm90_fp8_gemm_1d2d_impl", "GEMM"),
    ("fused_moe_kernel", "fused_moe_kernel", "MoE"),
    ("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1", "_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1", "MoE"),
    (
        "void vllm::moe::topkGating<4, 4, 4, 16, 32, int, float, (vllm::moe::ScoringFunc)1>(float const*, ...)",
        "topkGating",
        "MoE",
    ),
    ("void vllm::moe::grouped_topk_fused_kernel<float, float, int>(...)", "grouped_topk_fused_kernel", "MoE"),
    ("void marlin_moe_wna16::Marlin<1125899906909960l, 4>(int4 const*, ...)", "marlin_moe_wna16.Marlin", "MoE"),
    (
        "_ZN7cutlass13device_kernelIN55_GLOBAL__N__2dd8d898_22_grouped_mm_c3x_sm90_cu_4fc159ed21cutlass_3x_group_gemm"
        "INS_12float_e4m3_tENS_10bfloat16_tE",
        "cutlass_3x_group_gemm",
        "MoE",
    ),
    ("void marlin::Marlin<1125899906909960l, 4>(int4 const*, ...)", "marlin.Marlin", "GEMM"),
    ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "GEMM"),
    (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel__5x_cublas",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel__5x_cublas",
        "GEMM",
    ),
    (
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>(...)",
        "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8",
        "GEMM",
    ),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)", "splitKreduce_kernel", "GEMM"),
    (
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float>(cublasGemvParamsEx<int>)",
        "gemvx.kernel",
        "GEMM",
    ),
    (
        "void vllm::reshape_and_cache_flash_kernel<float, float, (vllm::Fp8KVCacheDataType)0>(float const*, ...)",
        "reshape_and_cache_flash_kernel",
        "cache write",
    ),
    (
        "void vllm::concat_and_cache_ds_mla_kernel<float, float, (vllm::Fp8KVCacheDataType)0>(float const*, ...)",
        "concat_and_cache_ds_mla_kernel",
        "cache write",
    ),
    (
        "void vllm::indexer_k_quant_and_cache_kernel<float, float, (vllm::Fp8KVCacheDataType)0>(float const*, ...)",
        "indexer_k_quant_and_cache_kernel",
        "cache write",
    ),
    ("void vllm::rms_norm_kernel<float, 1, 2, true>(float*, float const*, ...)", "rms_norm_kernel", "norm/rope/quant"),
    ("_fused_indexer_q_rope_quant_kernel", "_fused_indexer_q_rope_quant_kernel", "norm/rope/quant"),
    (
        "void per_token_group_quant_8bit_kernel<float, signed char, true, true, float, true>(float const*, ...)",
        "per_token_group_quant_8bit_kernel",
        "norm/rope/quant",
    ),
    ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "state"),
    ("_chunk_scan_fwd_kernel", "_chunk_scan_fwd_kernel", "state"),
    ("_causal_conv1d_update_kernel", "_causal_conv1d_update_kernel", "state"),
    (
        "void (anonymous namespace)::gdn_decode_post_conv_mtp_kernel<float, 1, true>(__nv_bfloat16 const*, ...)",
        "gdn_decode_post_conv_mtp_kernel",
        "state",
    ),
    (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        "communication",
    ),
    ("void vllm::cross_device_reduce_1stage<float, 2>(...)", "cross_device_reduce_1stage", "communication"),
    (COPY, "elementwise_kernel[direct_copy_kernel_cuda]", "other"),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array"
        "<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)",
        "vectorized_elementwise_kernel[CUDAFunctor_add]",
        "other",
    ),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, at::native::"
        "binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(...)",
        "vectorized_elementwise_kernel[MulFunctor]",
        "other",
    ),
    ("void vllm::act_and_mul_kernel<c10::BFloat16, ...>(c10::BFloat16*, ...)", "act_and_mul_kernel", "other"),
    ("copy_runs", "copy_runs", "other"),
    ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD", "other"),
    ("Memset (Device)", "Memset", "other"),
    ("triton_poi_fused_add_0", "triton_poi_fused_add_0", "other"),
    (
        "kernel_cutlass_kernel_flash_attncuteflash_fwdFlashAttentionForwardSm90_object_at__tensorptrbf16gmemalign16_0",
        "flash_attncuteflash_fwdFlashAttentionForwardSm90",
        "attention",
    ),
    ("aten::topk", "aten::topk", "top-k"),
    ("aten::index_select", "aten::index_select", "gather/remap"),
    ("aten::index", "aten::index", "gather/remap"),
    ("aten::index_put_", "aten::index_put_", "cache write"),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", None, "attention"),
    ("aten::mm", "aten::mm", "GEMM"),
    ("aten::bmm", "aten::bmm", "GEMM"),
    ("aten::_fused_rms_norm", "aten::_fused_rms_norm", "norm/rope/quant"),
    ("aten::copy_", "aten::copy_", "other"),
    ("_C::onednn_mm", "_C::onednn_mm", "GEMM"),
]


# What three profiles on an H200 held, of DeepSeek-V3.2, DeepSeek-V4.1-Flash and Llama-3.1-8B under vLLM 0.33, in steps
# of 100,000 tokens: each name without its template arguments and parameters where it stays itself.
SEEN = {
    "top-k": """cooperative_topk_cs8 topKPerRowPrefill gatherTopK radixSortKVInPlace computeBlockDigitCounts
        computeDigitCumSum computeBlockwiseWithinKCounts computeBlockwiseKthCounts DeviceScanByKeyKernel
        DeviceScanByKeyInitKernel mbtopk.fill _candidate_flags_kernel _mask_candidates_kernel
        _store_candidates_kernel""",
    "indexer scores": "sm90_fp8_mqa_logits sm90_fp8_paged_mqa_logits _block_scores_kernel",
    "gather/remap": """cp_gather_and_upconvert_fp8_kv_cache_page cp_gather_indexer_k_quant_cache_kernel
        sparse_mla_index_remap_kernel _compute_global_topk_indices_and_lens_kernel vectorized_gather_kernel
        _scatter_gather_elementwise_kernel[TensorAssign] device_kernel.tensorptrbf16gmemalign32o512i64div16i64div161""",
    "attention": """sparse_attn_fwd_kernel flash_fwd_splitkv_mla_fp8_sparse_kernel flash_fwd_mla_combine_kernel
        FlashAttnFwdSm90 FlashAttnFwdCombine""",
    "MoE": """fused_moe_kernel moe_sum_vec_kernel moe_align_block_size_kernel count_and_sort_expert_tokens_kernel
        moe_align_block_size_small_batch_expert_kernel grouped_topk_fused_small_expert_count_kernel
        marlin_moe_wna16.Marlin topkGatingSoftplusSqrt""",
    "GEMM": """sm90_fp8_gemm_1d2d_impl marlin.Marlin sm90_tf32_hc_prenorm_gemm_impl splitKreduce_kernel
        nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNN nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT
        nvjet_sm90_tss_32x64_64x16_1x4_h_bz_splitK_TNN
        vllmmodel_executorkernelslinearcute_dsl_ll_bf16_splitkLLBf16SplitK""",
    "norm/rope/quant": """per_token_group_quant_8bit_register_kernel _fused_norm_rope_kernel _fused_embed_norm_kernel
        _fused_q_kernel fused_add_rms_norm_kernel rms_norm_kernel rotary_embedding_kernel
        _fused_save_compress_norm_kernel fusedDeepseekV4QNormRopeKVRopeQuantInsertKernel
        fusedDeepseekV4QNormRopeKVRopeQuantInsertKernelReducedGrid mhc_pre_big_fuse_with_norm_tilelang_kernel
        mhc_fused_tilelang_kernel mhc_post_tilelang_kernel _hc_head_reduce_store_kernel
        device_kernel.tensorptri64gmemo1""",
    "cache write": """reshape_and_cache_flash_kernel _rope_quant_insert_kernel _indexer_k_norm_rope_quant_store_kernel
        index_elementwise_kernel[index_copy_kernel_impl]""",
    "other": """kernel[unnamed] ConcatMLAQKernel act_and_mul_kernel indexSelectSmallIndex Memset
        vectorized_elementwise_kernel[CUDAFunctor_add] vectorized_elementwise_kernel[FillFunctor]
        vectorized_elementwise_kernel[div_floor_kernel_cuda] elementwise_kernel[direct_copy_kernel_cuda]
        unrolled_elementwise_kernel[direct_copy_kernel_cuda]""",
}
# Those that a profiler names otherwise.
SIGNATURES = {
    "fused_add_rms_norm_kernel": (
        "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type vllm::"
        "fused_add_rms_norm_kernel<c10::BFloat16, 8, true>(c10::BFloat16*, long, c10::BFloat16*, c10::BFloat16 const*,"
        " float, int, int, long)"
    ),
    "mbtopk.fill": "void at::native::mbtopk::fill<unsigned int, unsigned int>(unsigned int*, unsigned int, ...)",
    "kernel[unnamed]": "kernel",
    "device_kernel.tensorptri64gmemo1": (
        "kernel_cutlass_device_kernel_tensorptri64gmemo1_tensorptrbf16gmemalign32o64128_0"
    ),
    "device_kernel.tensorptrbf16gmemalign32o512i64div16i64div161": (
        "kernel_cutlass_device_kernel_tensorptrbf16gmemalign32o512i64div16i64div161_tensorptru8gmemalign16_0"
    ),
}


@pytest.mark.parametrize(("name", "role"), [(name, role) for role, names in SEEN.items() for name in names.split()])
def test_names_that_an_h200_gave(name, role):
    assert role_of(name) == role
    assert short_name(name) == name
    assert short_name(SIGNATURES.get(name, name)) == name


def test_signs_within_template_arguments_are_no_brackets():
    assert short_name("void f<(8 > 4), g<(1 < 2)> >(int)") == "f"
    assert short_name("std::enable_if<((8)>(0)) && (n<(3)), void>::type a::b<c::d<int>, 8>(c::d<int>*)") == "b"


@pytest.mark.parametrize(("full", "short", "role"), NAMES, ids=lambda value: str(value)[:40])
def test_real_names(full, short, role):
    assert short_name(full) == (short or full)
    assert role_of(full) == role
    assert role_of(short_name(full)) == role


@given(st.one_of(st.text(), st.text(alphabet="ab_:<>(), 12{}LSTEINZ[]*&-")))
@example("")
@example(" \n")
@example("(anonymous namespace)::")
@example("_Z")
@example("a::b::")
@example("device_kernel<device_kernel<x>>")
@example("GemmType)1GemmType)2")
@example("kernel_cutlass_kernel_kernel_cutlass_kernel_object_at_")
def test_a_short_name_is_never_empty_never_long_and_final(name):
    short = short_name(name)
    assert short.strip()
    assert len(short) <= 100
    assert short_name(short) == short
    assert role_of(name) == role_of(short)
    assert role_of(name) in ROLES


identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{3,20}", fullmatch=True)


@given(st.lists(identifiers, min_size=1, max_size=4), identifiers, st.integers(0, 999))
def test_a_mangled_name_is_shortened_like_the_demangled_one(path, argument, number):
    """libkineto demangles only names of up to 1,024 characters, so the same kernel may come either way."""
    mangled = f"_ZN{''.join(f'{len(p)}{p}' for p in path)}I{len(argument)}{argument}Li{number}EEEvPKfi"
    demangled = f"void {'::'.join(path)}<{argument}, {number}>(float const*, int)"
    assert short_name(mangled) == short_name(demangled)


def test_selection_and_rules_name_roles_and_sources():
    assert set(SELECTION) < set(ROLES)
    assert ROLES[-1] == OTHER
    assert all(source for _, _, source in RULES)
    assert len({role for role, _, _ in RULES}) == len(RULES)
