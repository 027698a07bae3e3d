"""Layer 1: roles, what a layer's cache is for: its keys and values, an indexer's keys, a state, a window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvlab.kv.formats import Format, IndexerFormat
from kvlab.kv.specs import declared_name, is_recurrent, kind_names

ROLES = ("kv", "indexer", "state", "window")
_WINDOW_KINDS = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})


def role_of(spec: Any, fmt: Format | None) -> str:
    """The role of a layer's cache: `kv`, `indexer`, `state` or `window`; never read off a shape.

    Args:
        spec: the layer's spec. Recurrent states and rings are `state`, whatever their bytes; sliding windows `window`.
        fmt: the byte format, which decides for `indexer`; a spec whose `cache_role` says so serves too. None for a
            state whose format is not known.
    """
    if is_recurrent(spec):
        return "state"
    if isinstance(fmt, IndexerFormat) or declared_name(getattr(spec, "cache_role", None)).lower() == "indexer":
        return "indexer"
    return "kv" if kind_names(spec).isdisjoint(_WINDOW_KINDS) else "window"


def in_order(roles: Iterable[str]) -> list[str]:
    """Distinct roles in the order of `ROLES`."""
    found = set(roles)
    return [role for role in ROLES if role in found]
