"""Run in a process of its own: load a preset in vLLM twice and close it with all that a notebook may still hold, print
what of the model is alive as one JSON object.

MoE models get the loader of MXFP4 scales, whose kernels no CPU without AMX has: it is what kept a closed model alive.
"""

import gc
import json
import os
import sys
import weakref
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kvlab.cases import parse_case
from kvlab.engines.load import load_engine
from kvlab.engines.vllm import engine as vllm_engine
from kvlab.engines.vllm.arguments import set_environment
from kvlab.engines.vllm.flavour import installed_flavour
from kvlab.errors import KvlabError
from kvlab.kv.views import iter_tensors

CASES = [parse_case(text) for text in ("decode=2*1@300", "hit=16@150")]


def main(model):
    set_environment(installed_flavour(), model)
    wrap_expert_loaders()
    held, answers = [], {}
    drop_leftovers, vllm_engine.drop_leftovers = vllm_engine.drop_leftovers, gc.collect
    watched = used_and_closed(model, held)
    answers["alive_before"] = alive(watched)
    vllm_engine.drop_leftovers = drop_leftovers
    drop_leftovers()
    answers["alive"] = [alive(watched), alive(used_and_closed(model, held))]
    answers["parameters"] = parameters()
    answers["said"] = said_when_closed(held)
    answers["unloaded"] = raised(lambda: load_engine(model, "vllm", cases=CASES, num_kv_blocks=2, seed=1), held)
    answers["parameters_unloaded"] = parameters()
    answers["interrupted"] = interrupted(model, held)
    answers["parameters_interrupted"] = parameters()
    answers["launch_interrupted"] = sorted(name for name in os.environ if name in ("KVLAB_LAUNCH", "RANK"))
    engine = load_engine(model, "vllm", cases=CASES, num_kv_blocks=64, seed=1)
    answers["loads_again"] = engine.num_blocks
    print(json.dumps(answers))


def wrap_expert_loaders():
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

    usual = UnquantizedFusedMoEMethod.create_weights

    def create_weights(self, *args, weight_loader, **kwargs):
        usual(self, *args, weight_loader=Mxfp4MoEMethod.get_scale_weight_loader(weight_loader), **kwargs)

    UnquantizedFusedMoEMethod.create_weights = create_weights


def used_and_closed(model, held):
    """Put an engine through what it can do, failures too; `held` gets all that a caller sees of it."""
    engine = load_engine(model, "vllm", cases=CASES, num_kv_blocks=64, seed=1)
    watched = watch(engine)
    layer = next(module for name, module in engine.runner.model.named_modules() if name.endswith("layers.0"))

    def broken(*args, **kwargs):
        raise RuntimeError("no kernel image is available")

    layer.forward = broken
    failed = [lambda: engine.prepare(CASES[0]), lambda: engine.prefill(CASES[0])]
    said = [raised(call, held) for call in failed]
    del layer.forward
    held.append(engine.prefill(CASES[1]))
    closed = engine.prepare(CASES[0])
    closed.fill("random")
    closed.forward()
    closed.close()
    last = engine.prepare(CASES[1])
    last.prefilled = held[-1]
    last.fill("prefill")
    last.forward()
    last.expert_loads()
    layer.forward = broken
    said += [raised(call, held) for call in (last.forward, last.first_nonfinite, last.expert_loads)]
    del layer.forward, layer  # the errors keep this call, which they were raised in
    assert all("no kernel image" in each for each in said), said
    engine.close()
    engine.close()
    held += [engine, closed, last]
    return watched


def watch(engine):
    """Name -> whether it is gone, of tensors by their storage, which any view keeps; name -> what still is there."""
    runner, llm = engine.runner, engine._llm
    tensors = {**dict(runner.model.named_parameters()), **dict(runner.model.named_buffers())}
    for name, cache in engine.kv_caches.items():
        tensors |= {f"cache {name} {i}": tensor for i, tensor in enumerate(iter_tensors(cache))}
    objects = {"runner": runner, "core": llm.llm_engine.engine_core.engine_core, "config": runner.vllm_config}
    storages = {name: StorageWeakRef(tensor.untyped_storage()).expired for name, tensor in tensors.items()}
    return storages, {name: weakref.ref(each) for name, each in objects.items()}


def alive(watched):
    gc.collect()
    storages, objects = watched
    return [name for name, gone in storages.items() if not gone()] + [name for name, ref in objects.items() if ref()]


def parameters():
    """How many there are in this process."""
    gc.collect()
    return sum(issubclass(type(thing), torch.nn.Parameter) for thing in gc.get_objects())


def interrupted(model, held):
    """What ends a load that is interrupted once the weights are there, and one whose engine fails unforeseen."""
    said = []
    for error in (KeyboardInterrupt(), KeyError("a name that moved")):
        with patch.object(vllm_engine, "attention_groups", side_effect=error):
            try:
                load_engine(model, "vllm", cases=CASES, num_kv_blocks=64, seed=1)
            except BaseException as raised:
                held.append(raised)
                said.append(f"{type(raised).__name__}: {raised}")
    return said


def raised(call, held):
    try:
        call()
    except KvlabError as error:
        held.append(error)
        return f"{type(error).__name__}: {error}"
    return None


def said_when_closed(held):
    engine, _, step = held[-3:]
    calls = {
        "prepare": lambda: engine.prepare(CASES[0]),
        "prefill": lambda: engine.prefill(CASES[0]),
        "provenance": engine.provenance,
        "fill": lambda: step.fill("zeros"),
        "restore": step.restore,
        "forward": step.forward,
        "selection": step.selection,
    }
    return {name: raised(call, held) for name, call in calls.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
