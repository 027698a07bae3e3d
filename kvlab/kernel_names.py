"""Layer 0: a kernel's short name and its role in the step, from the name that a profiler gives.

C++ kernels come demangled, with template arguments and parameters, or mangled where the name is longer than 1,024
characters (libkineto does not demangle those; FlashAttention-3's are). Triton's come as their functions are called,
CuTe DSL's with the types of their arguments appended, CPU operators as `aten::mm`.

Many of vLLM's Triton kernels are methods that are all called `kernel` (`VllmTritonJitKernel`): a profiler gives that
name and no class, so they are one row, `kernel[unnamed]`, whose role is `other`. DeepSeek-V4.1's are its norms of q and
kv, the inverse rotation of attention's output and, in a prefill, the merging of indices.
"""

from __future__ import annotations

import re
from functools import lru_cache

TOPK, SCORES, GATHER = "top-k", "indexer scores", "gather/remap"
ATTENTION, MOE, GEMM, NORM = "attention", "MoE", "GEMM", "norm/rope/quant"
CACHE_WRITE, STATE, COMMUNICATION, OTHER = "cache write", "state", "communication", "other"
# Of no kernel: what a profile's kernels leave of the step; their sum closes on the timed total when it is this close.
REST, CLOSE = "rest", 0.03

# What the choice of tokens costs in sparse attention: choosing, and finding what was chosen. Scoring is not of it: the
# scores are computed for all tokens, whatever they hold.
SELECTION = (TOPK, GATHER)

# Tried in this order on the short name, letter case aside; the first that is found decides. Sources are files of
# vLLM 0.33 (`csrc` by the symbols of its wheel) unless a project is named.
RULES: tuple[tuple[str, str, str], ...] = (
    (
        COMMUNICATION,
        r"nccl|nvshmem|c10d::|gloo|cross_device_|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|lamport|multimem"
        r"|mnnvl|quickreduce|oneshot|twoshot|internode|intranode|shm_(send|recv|gather|all)|_a2a_|output_lse|lse_combine",
        "csrc/custom_all_reduce.cuh, csrc/mnnvl_lamport*.cuh, DeepEP, vllm/v1/attention/ops/dcp.py",
    ),
    (
        MOE,
        r"moe|expert|topkgating|grouped_topk|single_group_topk|hashtopk|router|routing|matmul_ogs|bitmatrix|expt_data"
        r"|grouped_gemm(?!a)|group_gemm|\[\w*grouped|_topk_forward|_reduce_grouped|_ep_(gather|scatter)|inputrowskernel"
        r"|preprocesstopk|globalize_recv|silu_mul_fp8_quant_deep_gemm|fused_gas|gate_up_gemv|inkling_gate",
        "csrc/moe/*.cu, vllm/model_executor/layers/fused_moe/, vllm/third_party/triton_kernels/, DeepGEMM (GemmType)",
    ),
    (
        SCORES,
        r"mqa_logits|clean_logits|index_(block_)?score|qsa_mqa|block_scores_kernel",
        "DeepGEMM impls/*_mqa_logits.cuh, vllm/v1/attention/ops/rocm_paged_mxfp4_indexer.py",
    ),
    (
        CACHE_WRITE,
        r"_and_cache|reshape_cache|(?<!ropequant)insert|index_put|index_copy|(kv|k|quant|rope|mxfp4)_(cache_)?(write|store)_|write_cache"
        r"|fullcachekernel|store_sparse_attn|concatkvcache|kvcachefp8|_tq_fused_store|rope_cache|ultraquant_store"
        r"|(cache|window)_store|apply_write|kv_cache_scatter|dsmla|aten::scatter",
        "csrc/cache_kernels.cu, csrc/fused_*_insert*.cu, vllm/v1/attention/ops/triton_reshape_and_cache_flash.py",
    ),
    (
        GATHER,
        r"convert_req_index|remap|global_(index|topk|slot)|topk_(global|swa|ragged|indices|lens)|compact_.*topk|globalize"
        r"|localize|(expand|compact|pack)_.*ind(ex|ices)|(swa|sparse)_indices|cp_gather|cache_gather|and_gather"
        r"|gather_(k|kv|swa|prefill|page|cache|and_maybe|and_upconvert)|dequant_gather|kv_gather|vectorized_gather"
        r"|device_kernel\.tensorptrbf16gmem\w*o512i64"
        r"|index_?select(?!smallindex|largeindex)|index_kernel_impl|_scatter_gather_elementwise|indexfunc"
        r"|sparse_block_table|copy_page_indices|aten::(index|gather|take|take_along_dim)\b",
        "vllm/v1/attention/backends/mla/sparse_utils.py, csrc/cache_kernels.cu, vllm/models/deepseek_v4/nvidia/ops/"
        "dequant_gather_k_cutedsl.py; PyTorch's indexing, but for `indexSelect*Index`, which looks embeddings up",
    ),
    (
        STATE,
        r"mamba|gdn|kda|ssm|selective_(scan|state)|delta_rule|recurrent|causal_conv1d|post_conv|conv_state|_convolution|linear_attn"
        r"|chunk_(scan|state|cumsum|local|gla|kda|fwd|scaled|gated|delta)|state_passing|bmm_chunk|solve_tril|l2norm"
        r"|recompute_w_u|merge_16x16|gather_initial_states|scatter_states|fwd_kv_(parallel|reduce)|fwd_(none_)?diag",
        "vllm/model_executor/layers/mamba/ops/, vllm/third_party/flash_linear_attention/, csrc/mamba/",
    ),
    (
        ATTENTION,
        r"(?<!d)flash|fmha|attn_fwd|attention|sdpa|merge_(attn|mla)|topk_attn|splitkv|mla_(decode|sparse|prefill|metadata)"
        r"|sparse_(attn|mla|decode)|^_fwd_(grouped_)?kernel|kernel_paged|reduce_segments|segmented_attention"
        r"|prepare_varlen|split_kv_stage|gqa_sparse|swa_decode|decode_kvcache|core_attn|octave_(prefill|decode)"
        r"|(block32|qsa)_.*splitk|tq_decode",
        "csrc/attention/, FlashAttention 2 and 3, FlashMLA, vllm/v1/attention/ops/; PyTorch's SDPA",
    ),
    (
        TOPK,
        r"top_?k(?!_topp)|kthvalue|radix_?(sort|find)|bitonicsort|segmented_?sort|withinkcounts|kthcounts|digitcounts"
        r"|digitcumsum|devicescanbykey|_candidates?_(flags_)?kernel|_candidates_strided_kernel|aten::sort\b",
        "csrc/topk.cu, csrc/persistent_topk.cuh, csrc/cooperative_topk.cuh, csrc/sampler.cu, DeepSelect; torch.topk;"
        " vllm/model_executor/kernels/attention/dsa/candidate_blocks.py",
    ),
    (
        NORM,
        r"(?<!pre)norm|rotary|rope|quant|hadamard|fwht|cvt_fp16|_to_mxfp|convert_fp8|ue8m0|transpose_fp32"
        # Hyper-connections, which vLLM fuses with the norms; the indexer's rotated query, told by its int64 positions.
        r"|_fused_q_kernel|\bmhc_|^_hc_head|device_kernel\.tensorptri64gmem",
        "csrc/layernorm_kernels.cu, csrc/pos_encoding_kernels.cu, csrc/quantization/, DeepGEMM impls/smxx_layout.cuh,"
        " vllm/models/deepseek_v32/common/kernels.py, vllm/model_executor/kernels/mhc/, vllm/models/deepseek_v4/nvidia/"
        "ops/fused_indexer_q_cutedsl.py",
    ),
    (
        GEMM,
        r"gemm|gemv|nvjet|cublas|xmma|cutlass|marlin|machete|matmul|split_?k|_mmk?\b|mm_k|linear|_bmm|bmm_kernel"
        r"|(onednn|mkldnn)_|bhr_hdr|bmk_bnk|::(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|einsum)\b",
        "cuBLAS (nvjet, xmma), CUTLASS, DeepGEMM, csrc/quantization/; PyTorch's and oneDNN's CPU operators",
    ),
)
_RULES = tuple((role, re.compile(pattern, re.IGNORECASE)) for role, pattern, _ in RULES)
ROLES = (*(role for role, _, _ in RULES), OTHER)

_LONGEST = 100
# Kernels that do another's work: what they run is named by their first telling template argument.
_WRAPPERS = re.compile(
    r"device_kernel|Kernel2?|(legacy_|unrolled_|vectorized_|index_)?(elementwise|templated_elementwise)\w*kernel\w*"
    r"|_scatter_gather_elementwise_kernel|reduce_kernel|multi_tensor_apply_kernel|sort_kernel|DeviceReduce\w*Kernel"
)
_HIDDEN = re.compile(r"device_kernel|Kernel2?")
# The same name in several places: the namespace tells them apart.
_COMMON = re.compile(r"kernel|main_kernel|topk_kernel|fwd_kernel|bwd_kernel|fill|Marlin|dispatch|combine|oneshot")
# Template arguments that say nothing: namespaces and single words, types, adaptors around the functor.
_DULL = re.compile(
    r"[a-z]+\d*|.{1,2}|_GLOBAL__N_\w+|enable_\w+|\w+_t|sm\d+\w*|Array|BFloat16|Half|Float8\w+|__nv_\w+|__4|CUB_\w+"
    r"|THRUST_\w+|\w*_internal|gpu_kernel_impl\w*|gpu_index_kernel|_cuda_scatter_gather_internal_kernel|ReduceOp"
    r"|[AB]?[UB]?(nary|inary)Functor\w*|func_wrapper\w*|OpaqueType|TensorListMetadata|\w*OffsetCalculator"
    r"|TensorIteratorBase"
)
# CuTe DSL: what stands before a kernel's module and name, and the types of its arguments behind.
_CUTE_PREFIX = re.compile(r"^kernel_cutlass_(device_)?(kernel_)?")
# A kernel that is a function within a function has no module: the type of its first argument has to tell it.
_CUTE_NAMELESS = re.compile(r"tensorptr[a-z]+\d+gmem(align\d+)?o\w*?(?=_|$)")
_CUTE_TYPES = re.compile(r"_object_at_|_tensorptr|_tensor0+o|_(Copy|Mma)Atom|_TiledMMA|_TiledCopy")
# `GemmType` of DeepGEMM (deep_gemm/common/types.cuh): all but 0 are of experts, or of batches.
_GEMM_TYPE = re.compile(r"GemmType(?:\)|E)([1-6])\b|GemmTypeE([1-6])E")
_GEMM_KINDS = ("MGroupedContiguous", "MGroupedMasked", "KGrouped", "Batched", "MGroupedPsum", "KGroupedPsum")


@lru_cache(maxsize=4096)
def short_name(name: str) -> str:
    """The words that tell a kernel from others; shortening again changes nothing, and nothing becomes empty.

    `void vllm::topKPerRowPrefill<512, true>(float const*, ...)` is `topKPerRowPrefill`; a kernel that only runs
    another is named by what it runs (`FlashAttnFwdSm90`), or with it (`elementwise_kernel[MulFunctor]`); names of
    Triton kernels and of CPU operators stay as they are.
    """
    for _ in range(8):
        shorter = _shorten(name)
        if shorter == name:
            break
        name = shorter
    return name


@lru_cache(maxsize=4096)
def role_of(name: str) -> str:
    """What a kernel does in the step, one of `ROLES`, from its full or its short name; `other` where no rule fits."""
    short = short_name(name)
    return next((role for role, pattern in _RULES if pattern.search(short)), OTHER)


def _shorten(name: str) -> str:
    text = " ".join(name.split())
    if copy := re.match(r"(Memcpy|Memset)\b( [A-Za-z]to[A-Za-z]\b)?", text):
        return copy[0]
    if re.fullmatch(r"\w+::[\w.]+", text):
        return text[:_LONGEST]
    path, arguments = _mangled(text) if text.startswith("_Z") else _demangled(text)
    own = path[-1] if path else text
    own = _CUTE_TYPES.split(_CUTE_PREFIX.sub("", own))[0]
    if nameless := _CUTE_NAMELESS.match(own):
        return f"device_kernel.{nameless[0]}"[:_LONGEST]
    if text == "kernel":
        return "kernel[unnamed]"
    if _COMMON.fullmatch(own) and len(path) > 1:
        own = f"{path[-2]}.{own}"
    words = [word for word in arguments if not _DULL.fullmatch(word)]
    if _WRAPPERS.fullmatch(own) and words:
        own = words[0] if _HIDDEN.fullmatch(own) else f"{own}[{words[0]}]"
    if kind := _GEMM_TYPE.search(text):
        own = f"{own}[{_GEMM_KINDS[int(kind[1] or kind[2]) - 1]}]"
    elif "GroupProblemShape" in text and "[" not in own:
        own = f"{own}[grouped]"
    return own[:_LONGEST].strip() or "unnamed"


def _demangled(text: str) -> tuple[list[str], list[str]]:
    """Path (namespaces, then the name) of a C++ function, and the identifiers of its template arguments."""
    text = re.sub(r"\(anonymous namespace\)::|\{lambda[^}]*\}(::)?|\(\.\.\.\)", "", text)
    depth, brackets, plain, inside = 0, 0, [], []
    for character in text:
        # Within brackets, as in `enable_if<((8)>(0))>`, < and > may be signs; brackets hold both or neither else.
        if depth and character in "()":
            brackets = max(0, brackets + (1 if character == "(" else -1))
        if character == "<" and not brackets:
            depth += 1
        elif character == ">" and depth and not brackets:
            depth -= 1
        elif depth:
            inside.append(character)
        elif character == "(":
            break
        else:
            plain.append(character)
        if character in "<>":
            inside.append(" ")
    head = "".join(plain).strip()
    # What stands before the last space is the return type; names without C++ syntax hold no space.
    last = head.split(" ")[-1] if head else ""
    path = [part for part in last.split("::") if part]
    return path, re.findall(r"[A-Za-z_]\w*", "".join(inside))


# A literal, a substitution, a template parameter, or the length of an identifier.
_TOKEN = re.compile(r"L[a-z]n?\d+E|S[0-9A-Z]*_|T\d*_|(\d+)(?=[A-Za-z_])")
_START = re.compile(r"_ZN?K?(St)?")


def _mangled(text: str) -> tuple[list[str], list[str]]:
    """The same of an Itanium-mangled name, which spells each identifier after its length."""
    start = _START.match(text)
    assert start is not None
    end = at = start.end()
    path: list[str] = []
    inside: list[str] = []
    while token := _TOKEN.search(text, at):
        at = token.end()
        if token[1] is None:
            continue
        # The path is the unbroken run of identifiers at the front; an L marks internal linkage.
        words = path if text[end : token.start()] in ("", "L") and not inside else inside
        words.append(text[at : at + int(token[1])])
        at = end = at + int(token[1])
    return [word for word in path if not word.startswith("_GLOBAL__N_")], inside
