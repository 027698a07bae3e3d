"""Layer 0: cases, exact batches written as `NAME=[N*]Q[@K][c][:D],...`.

The grammar, the jitter and the shape files follow `vllm/benchmarks/forward/shapes.py` (vLLM 0.33), so that one
text means the same batch in both tools: Q query tokens, K tokens of KV after the step (Q included; Q alone is a fresh
prefill), `c` a chunk of a longer prefill, D draft tokens to verify, N such requests. Unless marked `c`, a prefill
with a prefix is a prefix-cache hit.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.errors import CaseError

# Up to 18 digits fit an int64, in which token counts are kept.
_N = "([0-9]{1,18})"
_REQUEST = re.compile(rf"(?:{_N}\*)?{_N}(?:@{_N})?(c)?(?::{_N})?")
_GRAMMAR = "[N*]Q[@K][c][:D]"
# Far above what any engine batches; a slip of the keyboard must not fill the memory with requests.
_MAX_COUNT = 1 << 20


@dataclass(frozen=True)
class Request:
    """One request of a batch.

    Attributes:
        query_len: tokens that the step computes, at least 1.
        kv_len: tokens of KV after the step, `query_len` included.
        num_draft_tokens: drafts verified in the step; then `query_len == 1 + num_draft_tokens`.
        chunked: the prefix came from earlier chunks of the same prefill, not from the prefix cache.

    Raises:
        CaseError: for lengths that contradict each other.
    """

    query_len: int
    kv_len: int
    num_draft_tokens: int = 0
    chunked: bool = False

    def __post_init__(self) -> None:
        if self.query_len < 1:
            raise CaseError(f"request {self}: a step computes at least 1 token; raise Q")
        if self.kv_len < self.query_len:
            raise CaseError(
                f"request {self}: K={self.kv_len} is less than Q={self.query_len}, but K includes the query;"
                f" write {self.query_len}@K with K >= {self.query_len}"
            )
        if self.num_draft_tokens < 0:
            raise CaseError(f"request {self}: D={self.num_draft_tokens} draft tokens; D is 0 or more")
        if self.num_draft_tokens and not self.is_decode:
            raise CaseError(
                f"request {self}: D={self.num_draft_tokens} drafts are verified in Q = 1 + D ="
                f" {1 + self.num_draft_tokens} tokens after a prefix (K > Q)"
            )
        if self.chunked and (self.is_decode or not self.prefix_len):
            raise CaseError(f"request {self}: 'c' marks a prefill chunk: Q > 1 after a prefix (K > Q)")

    def __str__(self) -> str:
        kv = f"@{self.kv_len}" if self.kv_len != self.query_len else ""
        drafts = f":{self.num_draft_tokens}" if self.num_draft_tokens else ""
        return f"{self.query_len}{kv}{'c' if self.chunked else ''}{drafts}"

    @property
    def prefix_len(self) -> int:
        """Tokens whose KV is in the cache before the step."""
        return self.kv_len - self.query_len

    @property
    def is_decode(self) -> bool:
        """Decode or verify; otherwise some prefill."""
        return self.prefix_len > 0 and self.query_len == 1 + self.num_draft_tokens

    @property
    def prefix_hit(self) -> bool:
        """A prefill whose prefix came from the prefix cache."""
        return self.prefix_len > 0 and not self.is_decode and not self.chunked

    @property
    def phase(self) -> str:
        """`decode`, `verify`, `prefill`, `chunk` or `hit`."""
        if self.is_decode:
            return "verify" if self.num_draft_tokens else "decode"
        if not self.prefix_len:
            return "prefill"
        return "chunk" if self.chunked else "hit"


@dataclass(frozen=True)
class Case:
    """A named batch: `Case("decode", (Request(1, 8192),) * 32)`.

    Raises:
        CaseError: for an empty name, one with `=` (the grammar could not carry it), or no requests.
    """

    name: str
    requests: tuple[Request, ...]

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise CaseError(f"case {str(self)!r} has no name; write NAME={_GRAMMAR}")
        if "=" in self.name:
            raise CaseError(f"case {self.name!r}: a name holds no '='; write NAME={_GRAMMAR}")
        if not self.name.isprintable():
            raise CaseError(f"case {self.name!r}: its name has characters that cannot be printed; use plain text")
        if not self.requests:
            raise CaseError(f"case {self.name!r} has no requests; write {self.name}={_GRAMMAR},...")

    def __str__(self) -> str:
        """The case in the grammar, runs of equal requests folded: `parse_case(str(case)) == case`."""
        runs: list[tuple[Request, int]] = []
        for request in self.requests:
            if runs and runs[-1][0] == request:
                runs[-1] = (request, runs[-1][1] + 1)
            else:
                runs.append((request, 1))
        return f"{self.name}=" + ",".join(f"{n}*{r}" if n > 1 else str(r) for r, n in runs)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the whole batch."""
        return sum(r.query_len for r in self.requests)

    @property
    def phase(self) -> str:
        """The one phase of all requests, or `mixed`."""
        phases = {r.phase for r in self.requests}
        return phases.pop() if len(phases) == 1 else "mixed"


def parse_case(text: str) -> Case:
    """Parse `NAME=[N*]Q[@K][c][:D],...`; without `NAME=` the text is its own name.

    Raises:
        CaseError: one line that shows the offending request within the text.
    """
    name, separator, body = text.partition("=")
    if not separator:
        name, body = text, text
    requests: list[Request] = []
    for item in body.split(","):
        match = _REQUEST.fullmatch(item.strip())
        if match is None:
            raise CaseError(f"case {text!r}: cannot read {item!r}; a request is {_GRAMMAR}, e.g. 32*1@8192")
        count, query, kv, chunked, drafts = match.groups()
        try:
            request = Request(int(query), int(kv or query), int(drafts or 0), chunked=bool(chunked))
        except CaseError as error:
            raise CaseError(f"case {text!r}: {error}") from None
        if count is not None and not 1 <= int(count) <= _MAX_COUNT:
            raise CaseError(f"case {text!r}: {item!r} asks for {count} requests; N is 1 to {_MAX_COUNT}")
        requests.extend([request] * int(count or 1))
    return Case(name, tuple(requests))


def jitter_kv_lens(case: Case, jitter: float, max_kv_len: int, seed: int) -> Case:
    """Draw each request's prefix uniformly within +-`jitter` of its length, capped at `max_kv_len` tokens of KV.

    Query lengths stay, and a prefix that was there stays at least one token long. The draw depends on the seed and
    the case's name only; it equals vLLM 0.33's for the same arguments.

    Args:
        jitter: fraction in [0, 1).
        max_kv_len: the model's longest KV, tokens.

    Raises:
        CaseError: when a request is longer than `max_kv_len`, or `jitter` is out of range.
    """
    if not 0 <= jitter < 1:
        raise CaseError(f"jitter {jitter} is out of range; give a fraction in [0, 1)")
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    requests = []
    for request in case.requests:
        if request.kv_len > max_kv_len:
            raise CaseError(
                f"case {case.name!r}: request {request} holds {request.kv_len} tokens of KV, but the model takes"
                f" {max_kv_len}; shorten K or raise --max-model-len"
            )
        prefix = request.prefix_len
        if prefix and jitter:
            prefix = max(1, round(prefix * rng.uniform(1 - jitter, 1 + jitter)))
        requests.append(replace(request, kv_len=min(request.query_len + prefix, max_kv_len)))
    return Case(case.name, tuple(requests))


def load_cases(path: str | Path) -> list[Case]:
    """Load cases from a JSON or YAML file in vLLM's form.

    `{"cases": [{"name": ..., "requests": [{"query_len": ..., "kv_len": ..., "num_draft_tokens": ..., "chunked": ...,
    "count": ...}]}]}`; the last three are optional.

    Raises:
        CaseError: naming the file and the entry.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CaseError(f"shape file {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        if path.suffix in (".yaml", ".yml"):
            import yaml

            data = yaml.safe_load(text)
        else:
            data = json.loads(text)
    except Exception as error:  # both parsers have families of their own
        raise CaseError(f"shape file {path}: {' '.join(str(error).split())}") from None
    entries = data.get("cases") if isinstance(data, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise CaseError(f'shape file {path}: expected {{"cases": [...]}} with at least one case')
    return [_case_from_mapping(entry, f"shape file {path}, case {i}") for i, entry in enumerate(entries)]


def _case_from_mapping(entry: Any, where: str) -> Case:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("requests"), list):
        raise CaseError(f'{where}: expected {{"name": ..., "requests": [...]}}, got {entry!r}')
    requests: list[Request] = []
    for i, item in enumerate(entry["requests"]):
        at = f"{where}, request {i}"
        if not isinstance(item, Mapping):
            raise CaseError(f"{at}: expected a mapping, got {item!r}")
        values = dict(item)
        count = values.pop("count", 1)
        known = {f.name for f in fields(Request)}
        if unknown := sorted(set(values) - known, key=repr):
            raise CaseError(f"{at}: unknown key {unknown[0]!r}; a request has {', '.join(sorted(known))}, count")
        if missing := sorted({"query_len", "kv_len"} - set(values)):
            raise CaseError(f"{at}: {missing[0]!r} is missing")
        for key, value in {**values, "count": count}.items():
            wanted = bool if key == "chunked" else int
            if type(value) is not wanted:
                raise CaseError(f"{at}: {key} is {value!r}; give {'true or false' if wanted is bool else 'an integer'}")
        if not 1 <= count <= _MAX_COUNT:
            raise CaseError(f"{at}: count is {count}; give 1 to {_MAX_COUNT}")
        try:
            requests.extend([Request(**values)] * count)
        except CaseError as error:
            raise CaseError(f"{at}: {error}") from None
    name = entry.get("name", "")
    if not isinstance(name, str):
        raise CaseError(f"{where}: name is {name!r}; give a text, in quotes")
    try:
        return Case(name, tuple(requests))
    except CaseError as error:
        raise CaseError(f"{where}: {error}") from None


def distinct_cases(cases: Iterable[Case | str]) -> list[Case]:
    """The cases, parsed.

    Raises:
        CaseError: for none, or two of one name.
    """
    listed = [cases] if isinstance(cases, str | Case) else cases
    parsed = [parse_case(case) if isinstance(case, str) else case for case in listed]
    if not parsed:
        raise CaseError("no case given; add --case NAME=[N*]Q[@K][c][:D], e.g. --case decode=4*1@4096")
    names = [case.name for case in parsed]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise CaseError(f"two cases are named {repeated[0]!r}; name each case once")
    return parsed


def claim_cases(longest: int | None = None) -> list[Case]:
    """What the claim about zero KV is about: decodes and prefix-cache hits at 8K and at 100K tokens of context.

    Args:
        longest: tokens of KV that the model takes; longer contexts are cut to it, and one that is left twice is left
            out.

    Raises:
        CaseError: for a model that takes fewer than 4 tokens.
    """
    if longest is not None and longest < 4:
        raise CaseError(f"the claim's cases take contexts of 4 tokens or more, but the model takes {longest}")
    contexts = dict.fromkeys(min(context, longest or context) for context in (8192, 100_000))
    cases = []
    for context, requests in zip(contexts, (32, 2), strict=False):
        cases.append(Case(f"decode{context}", (Request(1, context),) * requests))
        cases.append(Case(f"hit{context}", (Request(max(2, min(2048, context // 2)), context),)))
    return cases
