"""Layer 1: fills from their texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from kvlab.errors import FillError
from kvlab.kv.rules import Constant, Fill, Mix, Prefill, Random, Zeros
from kvlab.kv.scores import SCORES

_KINDS: tuple[type[Fill], ...] = (Zeros, Random, Constant, Prefill, Mix, *SCORES)
FILLS = {kind.kind: kind for kind in _KINDS}


def parse_fill(text: str | Fill) -> Fill:
    """`zeros`, `random(std=0.5, zero_fraction=0.25)`, `constant(0.015)`, `mix(kv=random, indexer=levels)`, ...

    A `Fill` passes through; `FILLS` has every kind.

    Raises:
        FillError: one line that shows what is wrong and what is known.
    """
    return text if isinstance(text, Fill) else _parse(text, text)


def _parse(text: str, whole: str, role: str | None = None) -> Fill:
    """A fill's text, which may be a role's part of a whole."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if match is None or match[1] not in FILLS:
        said = "unknown" if role is None else f"{role}={text!r} is unknown"
        raise FillError(f"fill {whole!r}: {said}; known are {', '.join(FILLS)}, e.g. random(std=0.5)")
    kind = FILLS[match[1]]
    if kind is Mix and role is not None:
        raise FillError(f"fill {whole!r}: a mix has no mix in it; give each role a fill of its own")
    known = [f.name for f in fields(kind)]
    given: dict[str, Any] = {}
    for position, item in enumerate(split_fills(match[2] or "")):
        name, equals, value = item.partition("=")
        if not equals and kind is not Mix:
            name, value = known[position] if position < len(known) else item, item
        name = name.strip()
        if name not in known or name in given or (kind is Mix and not equals):
            takes = ", ".join(known) or "nothing"
            raise FillError(f"fill {whole!r}: cannot place {item!r}; {match[1]} takes {takes}")
        given[name] = _parse(value.strip(), whole, name) if kind is Mix else _number(value, whole)
    if kind is Mix and "kv" not in given:
        raise FillError(f"fill {whole!r}: kv is missing, the fill of every role that is not named; add kv=random")
    return kind(**given)


def split_fills(text: str) -> Iterator[str]:
    """The parts between commas, as of a list of fills; those within parentheses are left whole, empty ones dropped."""
    depth, begin = 0, 0
    for end, sign in enumerate(f"{text},"):
        depth += (sign == "(") - (sign == ")")
        if (sign == "," and depth <= 0) or end == len(text):
            if item := text[begin:end].strip():
                yield item
            begin = end + 1


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FillError(f"fill {whole!r}: {text.strip()!r} is not a number") from None
