"""Write tests/data/vllm_0_33_batches.json: what vLLM 0.33's own forward benchmark makes of many cases and KV groups.

    python tools/golden_vllm.py --vllm-source DIR        # DIR holds an unpacked vLLM 0.33 wheel

Each entry holds the inputs, as text and numbers, and what vLLM's `jitter_kv_lens`, `build_batch` and
`touched_kv_views` return for them. `tests/kv/test_batch.py` compares kvlab with the file, and with a live vLLM where
one is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm_source import VllmForward, load_vllm

OUT = Path(__file__).parents[1] / "tests" / "data" / "vllm_0_33_batches.json"

# `dcp_sharded` is always said: vLLM's default is true in attention specs, and a stand-in has none.
FULL = {"kind": "FullAttentionSpec", "block_size": 16, "dcp_sharded": True}
MAMBA = {"kind": "MambaSpec", "block_size": 528}
MLA = {"kind": "MLAAttentionSpec", "block_size": 64, "dcp_sharded": False}
WINDOW = {"kind": "SlidingWindowSpec", "block_size": 16, "sliding_window": 128, "dcp_sharded": False}
WINDOW_MLA = {"kind": "SlidingWindowMLASpec", "block_size": 64, "sliding_window": 128, "dcp_sharded": False}
RING = {"kind": "CircularBufferSpec", "block_size": 8, "dcp_sharded": False}


def uniform(*members: dict[str, Any]) -> dict[str, Any]:
    """A uniform-type group of these specs."""
    return {"kind": "UniformTypeKVCacheSpecs", "block_size": members[0]["block_size"], "members": list(members)}


LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "full": [FULL],
    "mla": [{**MLA, "dcp_sharded": True}],
    "full+window": [{**FULL, "dcp_sharded": False}, WINDOW],
    "window": [{**WINDOW, "sliding_window": 33}],
    "window of one": [{**WINDOW, "sliding_window": 1, "block_size": 4}],
    "chunked local": [{**FULL, "kind": "ChunkedLocalAttentionSpec", "attention_chunk_size": 64}, FULL],
    "full that remembers a window": [{**FULL, "sliding_window": 64}],
    "hybrid": [{**FULL, "block_size": 528}, MAMBA, MAMBA],
    "replayed window and ring": [MLA, {**WINDOW_MLA, "bounded_replay": True}, RING],
    "two replayed windows": [
        {**WINDOW_MLA, "bounded_replay": True},
        {**WINDOW_MLA, "bounded_replay": True, "sliding_window": 300},
    ],
    "window without replay": [MLA, WINDOW_MLA],
    "uniform": [uniform(FULL, FULL, FULL)],
    "uniform mla": [uniform({**MLA, "tokens_per_state": 4}, {**MLA, "tokens_per_state": 16}), WINDOW_MLA],
    "uniform windows": [uniform({**WINDOW_MLA, "bounded_replay": True}, {**WINDOW_MLA, "bounded_replay": True}), MLA],
    "uniform states": [uniform(MAMBA, MAMBA), {**FULL, "block_size": 528}],
    "uniform sharded": [uniform({**MLA, "dcp_sharded": True}, {**MLA, "dcp_sharded": True}), RING],
}
CASES = (
    "decode=4*1@8192",
    "verify=3*4@4096:3",
    "prefill=2*777",
    "hit=512@2560",
    "chunk=512@2560c",
    "short=1@2,2@3,1,2@2,3@5:2",
    "mixed=300,2*1@1000,4@900:3,64@700c,64@700,5@6",
)


def inputs() -> Iterator[dict[str, Any]]:
    """The questions: every layout under every case, then random ones."""
    draw = random.Random(33)
    for case in CASES:
        for name, groups in LAYOUTS.items():
            sharded = any(_members(g)[0].get("dcp_sharded") for g in groups)
            yield {
                "layout": name,
                "groups": groups,
                "case": case,
                "jitter": draw.choice((0, 0.1, 0.5)),
                "dcp_size": draw.choice((1, 2, 8)) if sharded else 1,
                "lookahead": draw.choice((0, 0, 1, 4)),
                "seed": draw.randrange(1000),
            }
    # Public case: 32 tokens in blocks of 16, sharded over two ranks, fill one block.
    yield {
        "layout": "full",
        "groups": [FULL],
        "case": "pr54679=1@32",
        "jitter": 0,
        "dcp_size": 2,
        "lookahead": 0,
        "seed": 0,
    }
    for i in range(40):
        groups = [_random_spec(draw) for _ in range(draw.randint(1, 4))]
        yield {
            "layout": "random",
            "groups": groups,
            "case": f"random{i}=" + ",".join(_random_request(draw) for _ in range(draw.randint(1, 5))),
            "jitter": draw.choice((0, 0.3, 0.9)),
            "dcp_size": draw.choice((1, 2, 3, 4)),
            "lookahead": draw.choice((0, 1, 5)),
            "seed": draw.randrange(1000),
        }


def _members(group: dict[str, Any]) -> list[dict[str, Any]]:
    return group.get("members", [group])


def _random_spec(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(("FullAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec", "MambaSpec", "uniform"))
    if kind == "uniform":
        return uniform(*[{**FULL, "block_size": 32, "dcp_sharded": draw.random() < 0.5}] * draw.randint(1, 3))
    spec: dict[str, Any] = {"kind": kind, "block_size": draw.choice((1, 3, 16, 100))}
    if kind != "MambaSpec":
        spec["dcp_sharded"] = draw.random() < 0.5
    if kind.startswith("SlidingWindow"):
        spec["sliding_window"] = draw.randint(1, 200)
    if kind == "SlidingWindowMLASpec":
        spec["bounded_replay"] = draw.random() < 0.5
    return spec


def _random_request(draw: random.Random) -> str:
    kv = draw.randint(2, 600)
    query = draw.randint(1, kv)
    drafts = draw.randint(1, 6)
    return draw.choice(
        (
            f"1@{kv}",
            f"{query}",
            f"{query}@{kv}",
            f"2*{min(query + 1, kv)}@{kv + 1}c",
            f"{1 + drafts}@{kv + drafts}:{drafts}",
        )
    )


def answer(vllm: VllmForward, question: dict[str, Any]) -> dict[str, Any]:
    """vLLM's own results, in the form that the JSON file holds."""
    groups = [make_group(vllm, i, spec) for i, spec in enumerate(question["groups"])]
    case = vllm.shapes.jitter_kv_lens(
        vllm.shapes.parse_case(question["case"]), question["jitter"], 1 << 20, question["seed"]
    )
    arguments = (case, groups, 1 << 24, 50_000)
    extra = {"dcp_size": question["dcp_size"], "lookahead": question["lookahead"]}
    batch = vllm.batch.build_batch(*arguments, np.random.default_rng(question["seed"]), **extra)
    try:
        vllm.batch.build_batch(case, groups, 1, *arguments[3:], np.random.default_rng(0), **extra)
        refused = None
    except ValueError as error:
        refused = int(re.search(r"needs (\d+) KV blocks", str(error))[1])  # type: ignore[index]
    output = batch.scheduler_output
    news = output.scheduled_new_reqs
    return {
        "requests": [[r.query_len, r.kv_len, r.num_draft_tokens, int(r.chunked)] for r in case.requests],
        "num_tokens": batch.num_tokens,
        "num_blocks": batch.num_blocks,
        "blocks_needed": refused,
        "expected": [[*batch.expected[r][:2], int(batch.expected[r][2])] for r in batch.req_ids],
        "group_block_ranges": [[list(r) for r in ranges] for ranges in batch.group_block_ranges],
        "block_ids": [[fold(row) for row in new.block_ids] for new in news],
        "num_computed_tokens": [new.num_computed_tokens for new in news],
        "replay_start": [new.replay_start for new in news],
        "query_token_ids": digest(batch.query_token_ids[r] for r in batch.req_ids),
        "prompt_token_ids": digest(new.prompt_token_ids for new in news),
        "draft_token_ids": digest(output.scheduled_spec_decode_tokens.get(r, []) for r in batch.req_ids),
        "touched": touched_ranges(vllm, groups, batch, extra["dcp_size"], extra["lookahead"]),
    }


def make_group(vllm: VllmForward, index: int, question: dict[str, Any]) -> Any:
    """A KV cache group of vLLM's own specs, one layer a member."""
    members = [_make_spec(vllm, member) for member in _members(question)]
    layers = [f"group{index}.layer{k}" for k in range(len(members))]
    spec = members[0]
    if "members" in question:
        spec = vllm.interface.UniformTypeKVCacheSpecs(
            block_size=question["block_size"], kv_cache_specs=dict(zip(layers, members, strict=True))
        )
    return SimpleNamespace(layer_names=layers, kv_cache_spec=spec, kv_cache_group_id=index)


def _make_spec(vllm: VllmForward, question: dict[str, Any]) -> Any:
    arguments = {key: value for key, value in question.items() if key != "kind"}
    if question["kind"] == "MambaSpec":
        arguments |= {"shapes": ((2, 2),), "dtypes": (torch.float32,)}
    else:
        arguments |= {"num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
    return getattr(vllm.interface, question["kind"])(**arguments)


def touched_ranges(vllm: VllmForward, groups: list[Any], batch: Any, dcp_size: int, lookahead: int) -> list[Any]:
    """Per group and request, the blocks [begin, end) of vLLM's views, read off views of a cache of one byte a block."""
    cache = torch.empty(batch.num_blocks, 1, dtype=torch.int8)
    ranges = []
    for group, owned in zip(groups, batch.group_block_ranges, strict=True):
        first_layer = SimpleNamespace(layer_names=group.layer_names[:1], kv_cache_spec=group.kv_cache_spec)
        context = {group.layer_names[0]: SimpleNamespace(kv_cache=cache)}
        one_group = SimpleNamespace(expected=batch.expected, req_ids=batch.req_ids, group_block_ranges=[owned])
        views = vllm.kv_init.touched_kv_views(context, [first_layer], one_group, batch.num_blocks, dcp_size, lookahead)
        ranges.append([[v.storage_offset(), v.storage_offset() + len(v)] for v in views])
    return ranges


def fold(row: Iterable[int]) -> str:
    """A block table row as text: runs of consecutive IDs as `first-last`, runs of zeros as `0xN`."""
    runs: list[list[int]] = []
    for block in row:
        if runs and (block == runs[-1][1] + 1 if runs[-1][0] else block == 0):
            runs[-1][1 if block else 2] += 1
        else:
            runs.append([block, block, 1])
    return " ".join(f"{first}-{last}" if first else f"0x{count}" for first, last, count in runs)


def digest(rows: Iterable[Any]) -> str:
    """A hash of lists of integers, lengths included."""
    state = hashlib.sha256()
    for row in rows:
        ids = np.asarray(row, dtype="<i8")
        state.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return state.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-source", type=Path, help="folder that holds vllm/; else the installed vLLM")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    vllm = load_vllm(arguments.vllm_source)
    entries = [{**question, **answer(vllm, question)} for question in inputs()]
    head = {
        "vllm": vllm.version,
        "made_by": "tools/golden_vllm.py: vLLM's own jitter_kv_lens, build_batch and touched_kv_views",
        "numpy": np.__version__,
        "num_kv_blocks": 1 << 24,
        "vocab_size": 50_000,
        "max_kv_len": 1 << 20,
    }
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    text = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "entries": [\n' + lines + "\n]}\n"
    json.loads(text)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text, encoding="utf-8")
    print(f"{len(entries)} entries, {len(text) / 1000:.0f} kB: {arguments.out}")


if __name__ == "__main__":
    main()
