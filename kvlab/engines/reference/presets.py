"""Layer 2: the reference engine's models: one configuration, five small presets that differ by their layers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from kvlab.errors import EngineError

KINDS = ("full", "window", "mla", "dsa", "mamba")
LATENT_FORMATS = ("bfloat16", "fp8_ds_mla")
# The packed latent fixes its fields, so MLA has these widths whatever the model's size.
LATENT_RANK = 512
ROPE_WIDTH = 64
LATENT_WIDTH = LATENT_RANK + ROPE_WIDTH
INDEX_WIDTH = 128


@dataclass(frozen=True)
class ReferenceConfig:
    """A decoder of `num_layers` layers whose kinds repeat `pattern`.

    Attributes:
        name: of the preset.
        pattern: layer kinds: `full`, `window` (dense attention), `mla`, `dsa` (latent attention, all or top-k of the
            context), `mamba` (Mamba2).
        num_layers: layers; 0 for one pass of the pattern.
        hidden_size, intermediate_size, vocab_size: widths of residual stream, MLP and embedding.
        num_heads, num_kv_heads, head_dim: of attention; latent attention has one KV head.
        sliding_window: tokens that a `window` layer sees, the query's own included.
        block_size: tokens in an allocator block; raised until an attention page holds a Mamba state.
        kernel_blocks: kernel blocks in an allocator block of dense layers.
        latent_format: `bfloat16` or `fp8_ds_mla`, the cache of `mla` layers; `dsa` layers are always packed.
        index_heads, topk: of the sparse indexer; each query attends to its `topk` best tokens.
        mamba_heads, mamba_head_dim, state_size, conv_kernel: of Mamba2, with one group of B and C.
        rope_theta: base of the rotary embedding.
        max_model_len: longest context, tokens.

    Raises:
        EngineError: for values that contradict each other.
    """

    name: str
    pattern: tuple[str, ...]
    num_layers: int = 0
    hidden_size: int = 128
    intermediate_size: int = 256
    vocab_size: int = 4096
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    sliding_window: int = 512
    block_size: int = 32
    kernel_blocks: int = 2
    latent_format: str = "bfloat16"
    index_heads: int = 8
    topk: int = 128
    mamba_heads: int = 8
    mamba_head_dim: int = 16
    state_size: int = 32
    conv_kernel: int = 4
    rope_theta: float = 10000.0
    max_model_len: int = 131072

    def __post_init__(self) -> None:
        if not self.num_layers:
            object.__setattr__(self, "num_layers", len(self.pattern))
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value <= 0:
                raise EngineError(f"model {self.name!r}: {field.name} is {value}; give a positive number")
        unknown = sorted(set(self.pattern) - set(KINDS))
        if unknown or not self.pattern:
            raise EngineError(f"model {self.name!r}: layer kind {unknown or 'none'}; known are {', '.join(KINDS)}")
        if self.is_latent and len(set(self.pattern)) > 1:
            raise EngineError(
                f"model {self.name!r}: pattern {self.pattern} mixes latent layers with others, whose pages differ;"
                " use one kind"
            )
        if self.latent_format not in LATENT_FORMATS:
            raise EngineError(
                f"model {self.name!r}: latent_format {self.latent_format!r}; known are {', '.join(LATENT_FORMATS)}"
            )
        if self.num_heads % self.num_kv_heads:
            raise EngineError(
                f"model {self.name!r}: num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}"
            )
        for what, value, divisor in (
            ("block_size", self.block_size, self.kernel_blocks),
            ("head_dim", self.head_dim, 2),
        ):
            if value % divisor:
                raise EngineError(f"model {self.name!r}: {what}={value} is no multiple of {divisor}; raise it")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each layer."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    @property
    def is_latent(self) -> bool:
        """Whether attention is over latents; such a model has no dense layers."""
        return bool({"mla", "dsa"} & set(self.pattern))

    @property
    def rope_width(self) -> int:
        """Values of a head (or latent) that are rotated."""
        return ROPE_WIDTH if self.is_latent else self.head_dim

    @property
    def mamba_width(self) -> int:
        """Inner width of Mamba2."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of Mamba2's convolution: x, B and C."""
        return self.mamba_width + 2 * self.state_size


PRESETS: dict[str, ReferenceConfig] = {
    config.name: config
    for config in (
        ReferenceConfig("tiny-dense", ("full",) * 4),
        ReferenceConfig("tiny-swa", ("window", "full") * 2),
        ReferenceConfig("tiny-mla", ("mla",) * 2, num_heads=4, block_size=64, kernel_blocks=1, head_dim=64),
        ReferenceConfig("tiny-dsa", ("dsa",) * 2, num_heads=4, block_size=64, kernel_blocks=1, head_dim=64),
        ReferenceConfig("tiny-hybrid", ("mamba", "full") * 2),
    )
}


def find_config(model: str, **overrides: Any) -> ReferenceConfig:
    """A preset, with some of its values replaced.

    Raises:
        EngineError: for an unknown preset or field, with those that exist.
    """
    if model not in PRESETS:
        raise EngineError(f"model {model!r} is no preset of the reference engine; it has {', '.join(PRESETS)}")
    config = PRESETS[model]
    known = [f.name for f in fields(ReferenceConfig) if f.name != "name"]
    if unknown := sorted(set(overrides) - set(known)):
        raise EngineError(f"model {model!r} has no {unknown[0]!r}; it takes {', '.join(known)}")
    if "topk" in overrides and "dsa" not in config.pattern:
        raise EngineError(f"model {model!r} selects no tokens, so topk has no meaning; drop it, or load tiny-dsa")
    return replace(config, **overrides)
