"""Layer 1: fills under one roof: the rules, their texts, and their application."""

from __future__ import annotations

from kvlab.kv.filling import FillPlans, distinct_layers, fill_kv_blocks, zero_kv_blocks
from kvlab.kv.parsing import FILLS, parse_fill
from kvlab.kv.rules import STATE_SCALE, Constant, Fill, Mix, Prefill, Random, Zeros
from kvlab.kv.scores import SCORES, Scores

__all__ = [
    "FILLS",
    "SCORES",
    "STATE_SCALE",
    "Constant",
    "Fill",
    "FillPlans",
    "Mix",
    "Prefill",
    "Random",
    "Scores",
    "Zeros",
    "distinct_layers",
    "fill_kv_blocks",
    "parse_fill",
    "zero_kv_blocks",
]
