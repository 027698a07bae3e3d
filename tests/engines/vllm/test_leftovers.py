"""What vLLM and PyTorch keep of a closed model, on stand-ins for both: records, workspaces, frames of what raised."""

import gc
import sys
import traceback
import weakref
from types import ModuleType

import pytest
import torch
from torch import nn

from kvlab.engines.vllm import leftovers
from kvlab.engines.vllm.leftovers import ReleasedFrames, drop_leftovers, release_frames


class Layer(nn.Module):
    """As a quantised layer of vLLM's: a parameter's loader is a function around the layer's own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        load = self.load
        self.weight.weight_loader = lambda loaded: load(loaded)

    def load(self, loaded):
        self.weight.data.copy_(loaded)


@pytest.fixture
def module(monkeypatch):
    """Stands in for a module of vLLM's: call it with a name and the attributes."""

    def install(name, **attributes):
        made = ModuleType(name)
        vars(made).update(attributes)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return install


def test_a_layer_that_vllm_s_reload_record_refers_back_to_is_freed(module):
    record = weakref.WeakKeyDictionary()
    module("vllm.model_executor.model_loader.reload.layerwise", LAYERWISE_INFO=record)
    layer = Layer()
    record[layer] = dict(vars(layer.weight))
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is not None
    drop_leftovers()
    assert gone() is None


def test_every_record_is_emptied_and_every_workspace_unset(module):
    records = [vars(module(name, **{attribute: {1: 2}}))[attribute] for name, attribute in leftovers._EMPTIED]
    owners = [(module(name, **{attribute: torch.zeros(2)}), attribute) for name, attribute in leftovers._UNSET]
    drop_leftovers()
    assert records == [{}] * len(records)
    assert [getattr(owner, attribute) for owner, attribute in owners] == [None] * len(owners)


def test_what_a_vllm_has_not_is_passed_over(module, monkeypatch):
    for name, _ in (*leftovers._EMPTIED, *leftovers._UNSET):
        monkeypatch.delitem(sys.modules, name, raising=False)
    drop_leftovers()
    owners = [module(name) for name, _ in (*leftovers._EMPTIED, *leftovers._UNSET)]
    drop_leftovers()
    assert all(attribute not in vars(owner) for owner in owners for _, attribute in leftovers._UNSET)


@pytest.mark.vllm
def test_the_installed_vllm_has_every_record_and_workspace(python):
    script = """
from importlib.util import find_spec
from pathlib import Path
import sys
from kvlab.engines.vllm.arguments import set_environment
from kvlab.engines.vllm.flavour import installed_flavour
from kvlab.engines.vllm.leftovers import _EMPTIED, _UNSET
set_environment(installed_flavour(), "")
root = Path(find_spec("vllm").origin).parent
for module, name in (*_EMPTIED, *_UNSET):
    path = root.joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert any(line.startswith((f"{name}:", f"{name} =")) for line in source.read_text().splitlines()), (module, name)
    print(name)
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) == len(leftovers._EMPTIED) + len(leftovers._UNSET)


class Graph:
    """Stands in for a CUDA graph."""


@pytest.mark.parametrize(("initialized", "graphs", "cleared"), [(True, 0, 1), (True, 1, 0), (False, 0, 0)])
def test_blas_workspaces_go_where_no_graph_may_write_to_them(monkeypatch, initialized, graphs, cleared):
    calls = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append(1), raising=False)
    alive = [Graph() for _ in range(graphs)]
    drop_leftovers()
    assert len(calls) == cleared
    del alive


class Model:
    """Calls itself through a closure, as PyTorch does a module with hooks."""

    def __call__(self):
        def inner():
            raise RuntimeError(f"no kernel for {type(self).__name__}")

        return inner()


def test_a_kept_error_does_not_keep_the_model_that_raised():
    model = Model()
    gone = weakref.ref(model)
    kept = []
    try:
        try:
            model()
        except RuntimeError as error:
            release_frames(error)
            raise ValueError("one line") from error
    except ValueError as error:
        kept.append(error)
    del model
    gc.collect()
    assert gone() is None
    assert str(kept[0]) == "one line"
    told = "".join(traceback.format_exception(kept[0]))
    assert "RuntimeError: no kernel for Model" in told
    assert "in inner" in told


def test_what_passes_through_is_released_with_its_causes_and_ends_where_they_refer_to_each_other():
    model = Model()
    gone = weakref.ref(model)

    def fail(model):
        try:
            model()
        except RuntimeError as error:
            raise error from error

    with pytest.raises(RuntimeError, match="no kernel") as kept, ReleasedFrames():
        fail(model)
    del model
    gc.collect()
    assert gone() is None
    assert any("in inner" in note for note in kept.value.__notes__)
    with ReleasedFrames():
        pass
