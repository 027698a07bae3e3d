"""Layer 1: byte formats of KV caches: float values to bytes and back, field by field.

Random contents must be random values. Random bits decode to NaN now and then (e4m3fn has 2 non-finite codes of 256, a
UE8M0 scale one), and a packed token holds hundreds of codes. Every encoder here writes finite codes and positive,
finite scales only.

Views come in token-major form (`LayerTensor.token_major`): kernel blocks first, tokens at axis -2, values or bytes of
one token (and head) last: [blocks, ..., N, C]. Layouts: vLLM 0.33, `csrc/cache_kernels.cu` (656),
`vllm/models/deepseek_v4` (584), `indexer_k_quant_and_cache` (132), `triton_reshape_and_cache_flash.py` (per head).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from kvlab.errors import FormatError
from kvlab.kv.codecs import (
    as_bytes,
    as_finite,
    cast_saturating,
    decode_tiles,
    decode_ue8m0,
    encode_tiles,
    from_bytes,
    split_planes,
    to_bytes,
)

Fields = dict[str, torch.Tensor]


class Format(ABC):
    """How one token (and head) of one layer is stored.

    Attributes:
        name: as kvlab prints it.
        token_major: whether a token's values lie where the view says. Where not, a kernel orders a block's values its
            own way (vLLM's CPU attention keeps K transposed), and only whole blocks have an owner.
    """

    name: str
    token_major: bool = True

    @abstractmethod
    def width_of(self, last_dim: int) -> int:
        """Values a token (and head) that a view with this last dimension holds.

        Raises:
            FormatError: where the last dimension is not this format's.
        """

    @abstractmethod
    def fields(self, view: torch.Tensor) -> Fields:
        """Byte views of the fields: uint8 [blocks, ..., N, bytes], tokens at axis -2; writing them writes the cache."""

    @abstractmethod
    def encode_fields(self, values: torch.Tensor) -> Fields:
        """Bytes of float values [..., width]: per field, uint8 [..., bytes], contiguous."""

    @abstractmethod
    def decode_fields(self, fields: Fields) -> torch.Tensor:
        """Values of field bytes: float32 [..., width]; inverse of `encode_fields` up to rounding."""

    def check(self, view: torch.Tensor) -> None:
        """Refuse a view that cannot hold the format.

        Raises:
            FormatError: naming the format and the view's shape.
        """
        self.width_of(view.shape[-1])
        self.fields(view)

    def encode(self, values: torch.Tensor, view: torch.Tensor) -> None:
        """Write float values [blocks, ..., N, width] into a cache view; what is out of range is clamped."""
        encoded = self.encode_fields(values)
        for name, field in self.fields(view).items():
            field.copy_(encoded[name])

    def decode(self, view: torch.Tensor) -> torch.Tensor:
        """Read a cache view: float32 [blocks, ..., N, width]."""
        return self.decode_fields(self.fields(view))

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.name))


class RawFormat(Format):
    """Plain floats: bf16, fp16, fp32, fp64."""

    def __init__(self, dtype: torch.dtype, token_major: bool = True) -> None:
        self.dtype = dtype
        self.token_major = token_major
        self.name = str(dtype).removeprefix("torch.")

    def width_of(self, last_dim: int) -> int:
        return last_dim

    def check(self, view: torch.Tensor) -> None:
        if view.dtype != self.dtype:
            raise FormatError(f"{self.name} format on a {view.dtype} view of shape {tuple(view.shape)}")

    def fields(self, view: torch.Tensor) -> Fields:
        self.check(view)
        return {"values": as_bytes(view, self.name)}

    def encode_fields(self, values: torch.Tensor) -> Fields:
        return {"values": to_bytes(cast_saturating(values, self.dtype))}

    def decode_fields(self, fields: Fields) -> torch.Tensor:
        return from_bytes(fields["values"], self.dtype).float()

    def encode(self, values: torch.Tensor, view: torch.Tensor) -> None:
        # No bytes needed, nor a unit last stride: recurrent states come as transposed slices.
        self.check(view)
        view.copy_(cast_saturating(values, self.dtype))

    def decode(self, view: torch.Tensor) -> torch.Tensor:
        return view.float()


class Fp8Format(Format):
    """fp8 codes with one scale a tensor, kept outside the cache; the tensor may be typed fp8, uint8 or int8.

    Raises:
        FormatError: for a scale that is not a positive number.
    """

    def __init__(self, dtype: torch.dtype = torch.float8_e4m3fn, scale: float = 1.0, token_major: bool = True) -> None:
        if not 0 < scale < math.inf:
            raise FormatError(f"fp8 format: the tensor's scale is {scale}; give a positive number")
        self.dtype = dtype
        self.scale = scale
        self.token_major = token_major
        self.name = str(dtype).removeprefix("torch.")

    def width_of(self, last_dim: int) -> int:
        return last_dim

    def fields(self, view: torch.Tensor) -> Fields:
        if view.element_size() != 1:
            raise FormatError(f"{self.name} format on a {view.dtype} view of shape {tuple(view.shape)}")
        return {"codes": as_bytes(view, self.name)}

    def encode_fields(self, values: torch.Tensor) -> Fields:
        return {"codes": to_bytes(cast_saturating(values.float() / self.scale, self.dtype))}

    def decode_fields(self, fields: Fields) -> torch.Tensor:
        return from_bytes(fields["codes"], self.dtype).float() * self.scale


class PerTokenHeadFormat(Format):
    """int8 or e4m3 codes; a (token, head) row is K codes, their fp32 scale, V codes, their fp32 scale."""

    def __init__(self, dtype: torch.dtype = torch.int8) -> None:
        self.dtype = dtype
        self.max_code = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
        self.name = f"{str(dtype).removeprefix('torch.')}_per_token_head"

    def width_of(self, last_dim: int) -> int:
        if last_dim % 2 or last_dim // 2 <= 4:
            raise FormatError(f"{self.name}: a row is 2 * (head_size + 4) bytes, not {last_dim}")
        return last_dim - 8

    def fields(self, view: torch.Tensor) -> Fields:
        half = self.width_of(view.shape[-1]) // 2
        rows = as_bytes(view, self.name)
        k, k_scale, v, v_scale = rows.split_with_sizes([half, 4, half, 4], -1)
        return {"k": k, "k_scale": k_scale, "v": v, "v_scale": v_scale}

    def encode_fields(self, values: torch.Tensor) -> Fields:
        encoded: Fields = {}
        for name, half in zip("kv", as_finite(values).chunk(2, -1), strict=True):
            scale = (half.abs().amax(-1, keepdim=True) / self.max_code).clamp(min=1e-6)
            codes = half / scale
            if self.dtype == torch.int8:
                encoded[name] = to_bytes(codes.round().clamp(-self.max_code, self.max_code).to(torch.int8))
            else:
                encoded[name] = to_bytes(cast_saturating(codes, self.dtype))
            encoded[f"{name}_scale"] = to_bytes(scale)
        return encoded

    def decode_fields(self, fields: Fields) -> torch.Tensor:
        halves = [
            from_bytes(fields[name], self.dtype).float() * from_bytes(fields[f"{name}_scale"], torch.float32)
            for name in "kv"
        ]
        return torch.cat(halves, -1)


class _PackedFormat(Format):
    """A format of fixed width: `width` values in `num_bytes` a token."""

    width: ClassVar[int]
    num_bytes: ClassVar[int]

    def width_of(self, last_dim: int) -> int:
        if last_dim != self.num_bytes:
            raise FormatError(f"{self.name}: a token is {self.num_bytes} bytes, not {last_dim}")
        return self.width


class Fp8DsMlaFormat(_PackedFormat):
    """DeepSeek-V3.2's latent, 656 bytes a token: 512 e4m3 codes, 4 fp32 scales (128 each), 64 bf16 rope values."""

    name = "fp8_ds_mla"
    width = 576
    num_bytes = 656

    def fields(self, view: torch.Tensor) -> Fields:
        self.width_of(view.shape[-1])
        codes, scales, rope = as_bytes(view, self.name).split_with_sizes([512, 16, 128], -1)
        return {"codes": codes, "scales": scales, "rope": rope}

    def encode_fields(self, values: torch.Tensor) -> Fields:
        codes, exponents = encode_tiles(values[..., :512], 128)
        return {
            "codes": codes,
            "scales": to_bytes(torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)),
            "rope": to_bytes(cast_saturating(values[..., 512:], torch.bfloat16)),
        }

    def decode_fields(self, fields: Fields) -> torch.Tensor:
        scales = from_bytes(fields["scales"], torch.float32)
        return torch.cat(
            [
                decode_tiles(fields["codes"], scales, 128),
                from_bytes(fields["rope"], torch.bfloat16).float(),
            ],
            -1,
        )


class DeepseekV4Format(_PackedFormat):
    """DeepSeek-V4's latent on sm90, 584 bytes a token, planar in a block.

    First N rows of 448 e4m3 codes and 64 bf16 rope values (576 bytes), then N rows of 7 UE8M0 scales (64 codes each)
    and one zero byte.
    """

    name = "deepseek_v4"
    width = 512
    num_bytes = 584

    def fields(self, view: torch.Tensor) -> Fields:
        self.width_of(view.shape[-1])
        rows, tail = split_planes(view, 576, 8, self.name)
        codes, rope = rows.split_with_sizes([448, 128], -1)
        scales, pad = tail.split_with_sizes([7, 1], -1)
        return {"codes": codes, "rope": rope, "scales": scales, "pad": pad}

    def encode_fields(self, values: torch.Tensor) -> Fields:
        codes, exponents = encode_tiles(values[..., :448], 64)
        return {
            "codes": codes,
            "rope": to_bytes(cast_saturating(values[..., 448:], torch.bfloat16)),
            "scales": (exponents + 127).to(torch.uint8),
            "pad": torch.zeros_like(exponents[..., :1], dtype=torch.uint8),
        }

    def decode_fields(self, fields: Fields) -> torch.Tensor:
        scales = decode_ue8m0(fields["scales"])
        return torch.cat(
            [decode_tiles(fields["codes"], scales, 64), from_bytes(fields["rope"], torch.bfloat16).float()],
            -1,
        )


class IndexerFormat(_PackedFormat):
    """The sparse indexer's keys, 132 bytes a token, planar in a block: N rows of 128 e4m3 codes, then N fp32 scales."""

    name = "indexer"
    width = 128
    num_bytes = 132

    def fields(self, view: torch.Tensor) -> Fields:
        self.width_of(view.shape[-1])
        codes, scales = split_planes(view, 128, 4, self.name)
        return {"codes": codes, "scales": scales}

    def encode_fields(self, values: torch.Tensor) -> Fields:
        codes, exponents = encode_tiles(values, 128)
        return {
            "codes": codes,
            "scales": to_bytes(torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)),
        }

    def decode_fields(self, fields: Fields) -> torch.Tensor:
        return decode_tiles(fields["codes"], from_bytes(fields["scales"], torch.float32), 128)
