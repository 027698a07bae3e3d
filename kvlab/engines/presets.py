"""Layer 2: where a vLLM model's geometry comes from: a folder, a preset of this repository, or a model hub.

A preset is a `config.json` under `data/models`, with `kvlab_source` (what it is) and `kvlab_reduced` (what was cut so
that it fits one GPU of 141 GB). Weights are made up when it is loaded, so the configuration is all that is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvlab.engines.reference.presets import PRESETS
from kvlab.errors import EngineError

# Beside the package in a checkout; an installed wheel has no such folder.
PRESETS_FOLDER = Path(__file__).resolve().parents[2] / "data" / "models"
CONFIG = "config.json"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Keys that bound the context, as vLLM reads them (`vllm/transformers_utils/model_arch_config_convertor.py`).
# As `transformers_utils/model_arch_config_convertor.py` has them; `model_max_length` goes before all.
_CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
# Rotary scalings whose factor stretches the context beyond those keys; Gemma 3 has it counted in.
_STRETCHING, _STRETCHED = ("linear", "dynamic"), ("gemma3", "gemma3_text")


@dataclass(frozen=True)
class ModelSource:
    """A model as vLLM takes it.

    Attributes:
        name: what it was asked by.
        location: a folder with a `config.json`, or a hub name.
        config: the configuration; empty for a hub model that has none in this form.
    """

    name: str
    location: str
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of the configuration."""
        return self.config.get("text_config") or self.config

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of model classes, as in vLLM's registry."""
        return tuple(self.config.get("architectures") or ())

    @property
    def source(self) -> str:
        """What the geometry is, in words; empty where the configuration does not say."""
        return str(self.config.get("kvlab_source", ""))

    @property
    def reduced(self) -> dict[str, str]:
        """What was cut from the published geometry, by field, and `why`."""
        return dict(self.config.get("kvlab_reduced") or {})

    @property
    def index_topk(self) -> int | None:
        """Tokens that its sparse attention chooses; None for a model that attends to all."""
        return self.text_config.get("index_topk")

    @property
    def longest_context(self) -> int | None:
        """Tokens of KV that the model takes; None where the configuration alone does not tell."""
        text = self.text_config
        scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
        kind = scaling.get("rope_type") or scaling.get("type")
        if kind in _STRETCHING and text.get("model_type") not in _STRETCHED:
            return None
        lengths = [text[key] for key in _CONTEXT_KEYS if isinstance(text.get(key), int)]
        return text.get("model_max_length") or min(lengths, default=None)

    def overridden(self, overrides: Mapping[str, Any] | None) -> ModelSource:
        """The model with some values of its configuration replaced, as vLLM applies `hf_overrides`.

        Within a sub-configuration (`text_config`) values are replaced one by one; any other dictionary
        (`rope_parameters`) is replaced whole (`vllm/config/model.py`, _apply_dict_overrides).
        """
        config = dict(self.config)
        for key, value in (overrides or {}).items():
            nested = key.endswith("_config") and key != "quantization_config"
            config |= merged(config, {key: value}) if nested else {key: value}
        return replace(self, config=config)

    def topk_override(self, topk: int) -> dict[str, Any]:
        """`hf_overrides` with which sparse attention chooses `topk` tokens.

        Raises:
            EngineError: for a model that attends to all tokens, or a number that is not positive.
        """
        if self.index_topk is None:
            sparse = [name for name, preset in vllm_presets().items() if preset.index_topk]
            raise EngineError(
                f"model {self.name!r} has no index_topk: it attends to all tokens, so topk has no meaning; drop it"
                + (f", or load {' or '.join(sparse)}" if sparse else "")
            )
        if topk < 1:
            raise EngineError(f"topk is {topk}; give 1 or more tokens")
        return {"text_config": {"index_topk": topk}} if self.config.get("text_config") else {"index_topk": topk}


def vllm_presets() -> dict[str, ModelSource]:
    """The presets by name; empty where they are not installed."""
    found = sorted(PRESETS_FOLDER.glob(f"*/{CONFIG}"))
    return {path.parent.name: _read(path.parent.name, path.parent) for path in found}


def list_models() -> list[dict[str, Any]]:
    """One row per model that comes with kvlab: `model`, `engine`, `layers`, `architecture`, `source`, `reduced`."""
    reference = [
        {
            "model": name,
            "engine": "reference",
            "layers": config.num_layers,
            "architecture": ", ".join(dict.fromkeys(config.kinds)),
            "source": f"made up, tiny; {' and '.join(dict.fromkeys(config.kinds))} layers",
            "reduced": {},
        }
        for name, config in PRESETS.items()
    ]
    vllm = [
        {
            "model": name,
            "engine": "vllm",
            "layers": preset.text_config.get("num_hidden_layers"),
            "architecture": preset.architectures[0],
            "source": preset.source,
            "reduced": preset.reduced,
        }
        for name, preset in vllm_presets().items()
    ]
    return reference + vllm


def missing_presets() -> str | None:
    """How to come by the presets where they are not installed; None where they are."""
    if PRESETS_FOLDER.is_dir():
        return None
    return (
        "the vLLM presets come with a checkout of the repository, which the installed package lacks"
        f" ({PRESETS_FOLDER}); pip install --editable a checkout, or give a folder with a {CONFIG}"
    )


def find_model(model: str) -> ModelSource:
    """The model that a name stands for: a folder, a preset, or a hub name `ORG/NAME`, in this order.

    Raises:
        EngineError: for a name that is none of these, or a configuration that cannot be read or fetched.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _read(model, folder)
    if (PRESETS_FOLDER / model / CONFIG).is_file():
        return _read(model, PRESETS_FOLDER / model)
    if _HUB_NAME.fullmatch(model):
        return _fetch(model)
    if model in PRESETS:
        raise EngineError(f"model {model!r} is for engine 'reference'; vLLM's are {', '.join(vllm_presets())}")
    there_are = missing_presets() or f"presets are {', '.join(vllm_presets())}"
    raise EngineError(f"model {model!r} is no folder, no preset and no hub name ORG/NAME; {there_are}")


def _read(name: str, folder: Path) -> ModelSource:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngineError(f"model {name!r}: no {CONFIG} in this folder; give a folder that has one") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EngineError(f"model {name!r}: cannot read its {CONFIG}: {reason}; correct the file") from None
    if not isinstance(config, dict) or not config.get("architectures") or not config.get("model_type"):
        raise EngineError(f"model {name!r}: its {CONFIG} lacks architectures or model_type; give a Hugging Face one")
    return ModelSource(name, str(folder), config)


def _fetch(name: str) -> ModelSource:
    """A hub model with its configuration, from the local cache where it is there."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError:  # comes with vLLM, without which the model cannot be loaded either
        return ModelSource(name, name)
    try:
        return replace(_read(name, Path(hf_hub_download(name, CONFIG)).parent), location=name)
    except LocalEntryNotFoundError as error:
        raise _unreachable(name, error) from None
    except EntryNotFoundError:  # other layouts, such as Mistral's params.json, are left to vLLM
        return ModelSource(name, name)
    except EngineError:
        raise
    except Exception as error:  # a network, a token or a name that is refused: whatever the client raises
        raise _unreachable(name, error) from None


def _unreachable(name: str, error: Exception) -> EngineError:
    reason = str(error).strip().split("\n")[0]
    return EngineError(f"model {name!r} is no folder here, and the hub gave no {CONFIG}: {reason}; give a folder")


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with some of its values replaced, nested ones too; neither argument changes."""
    result = dict(config)
    for key, value in overrides.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result
