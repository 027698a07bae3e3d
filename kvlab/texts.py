"""Layer 0: lists of numbers and JSON objects as people type them."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from kvlab.errors import StudyError


def token_counts(text: str, what: str) -> tuple[int, ...]:
    """`1k, 8192` to (1024, 8192); k is 1,024.

    Raises:
        StudyError: naming the part that is no count of 1 or more.
    """
    parts = [part.strip().lower() for part in text.split(",") if part.strip()]
    for part in parts:
        if not re.fullmatch(r"[0-9]{1,12}k?", part) or not int(part.removesuffix("k")):
            raise StudyError(f"{what}: {part!r} is no number of 1 or more; write e.g. 1024, 8k")
    return tuple(int(part.removesuffix("k")) * (1024 if part.endswith("k") else 1) for part in parts)


def fractions(text: str, what: str) -> tuple[float, ...]:
    """`0, 0.5, 1` to (0.0, 0.5, 1.0).

    Raises:
        StudyError: naming the part that is no number in [0, 1].
    """
    values = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 1:
            raise StudyError(f"{what}: {part!r} is no number from 0 to 1; write e.g. 0, 0.5, 1")
        values.append(value)
    return tuple(values)


def words(text: str) -> tuple[str, ...]:
    """`decode, hit` to its words."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def json_object(text: str, what: str, example: str = '{"KEY": VALUE}') -> dict[str, Any]:
    """`{"a": [1]}` to a dict.

    Raises:
        StudyError: for any other JSON, or none.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StudyError(f"{what}: {text!r} is no JSON ({error}); write e.g. {example}") from None
    if not isinstance(value, dict):
        raise StudyError(f"{what}: {text!r} is no JSON object; write e.g. {example}")
    return value
