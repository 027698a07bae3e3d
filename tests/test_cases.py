"""The case grammar, the shape files and the jitter."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.cases import Case, Request, claim_cases, jitter_kv_lens, load_cases, parse_case
from kvlab.errors import CaseError, KvlabError

LONG = 1 << 20


@st.composite
def requests(draw, max_kv=LONG):
    """Any valid request."""
    prefix = draw(st.integers(0, max_kv - 1))
    query = draw(st.integers(1, max_kv - prefix))
    kind = draw(st.sampled_from(("plain", "verify", "chunk")))
    if prefix and kind == "verify" and query > 1:
        return Request(query, prefix + query, num_draft_tokens=query - 1)
    return Request(query, prefix + query, chunked=kind == "chunk" and prefix > 0 and query > 1)


NAMES = st.text(min_size=1, max_size=12).filter(lambda name: name.isprintable() and name.strip() and "=" not in name)
CASES = st.builds(
    lambda name, runs: Case(name, tuple(request for request, n in runs for _ in range(n))),
    NAMES,
    st.lists(st.tuples(requests(), st.integers(1, 4)), min_size=1, max_size=5),
)


def one_line(error: pytest.ExceptionInfo[KvlabError]) -> str:
    message = str(error.value)
    assert len(message.splitlines()) == 1, message
    return message


# The grammar.


@settings(max_examples=400, deadline=None)
@given(CASES)
def test_the_text_of_a_case_parses_back_to_it(case):
    assert parse_case(str(case)) == case


@settings(max_examples=300, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=3))
def test_a_text_without_a_name_is_its_own_name(reqs):
    body = ",".join(map(str, reqs))
    case = parse_case(body)
    assert (case.name, case.requests) == (body, tuple(reqs))
    assert parse_case(str(case)) == case


@pytest.mark.parametrize(
    ("text", "requests", "phase"),
    [
        ("decode=32*1@8192", [Request(1, 8192)] * 32, "decode"),
        ("verify=16*4@4096:3", [Request(4, 4096, 3)] * 16, "verify"),
        ("prefill=8192", [Request(8192, 8192)], "prefill"),
        ("one=1", [Request(1, 1)], "prefill"),
        ("hit=8192@40960", [Request(8192, 40960)], "hit"),
        ("chunk=8192@40960c", [Request(8192, 40960, 0, True)], "chunk"),
        ("mix=8192, 32*1@8192", [Request(8192, 8192)] + [Request(1, 8192)] * 32, "mixed"),
        ("zeros=01*01@08:0", [Request(1, 8)], "decode"),
        ("a=b=1@2", None, None),
        ("spaces= 2 *1", None, None),
    ],
)
def test_examples(text, requests, phase):
    if requests is None:
        with pytest.raises(CaseError):
            parse_case(text)
        return
    case = parse_case(text)
    assert list(case.requests) == requests
    assert case.phase == phase
    assert case.num_tokens == sum(r.query_len for r in requests)


@settings(max_examples=300, deadline=None)
@given(requests())
def test_every_request_has_one_phase(request):
    prefix = request.kv_len - request.query_len
    phase = request.phase
    assert request.prefix_len == prefix
    assert request.is_decode == (phase in ("decode", "verify"))
    assert request.prefix_hit == (phase == "hit")
    assert (phase == "prefill") == (prefix == 0)
    assert (phase == "chunk") == request.chunked
    assert (phase == "verify") == (request.num_draft_tokens > 0)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("=1", "has no name"),
        ("  =1", "has no name"),
        ("a=", "''"),
        ("a=1,", "''"),
        ("a=1,,2", "''"),
        ("a=1@8,x,2", "'x'"),
        ("a=-1", "'-1'"),
        ("a=1.5", "'1.5'"),
        ("a=1e3", "'1e3'"),
        ("a=1@", "'1@'"),
        ("a=@8", "'@8'"),
        ("a=*1", "'*1'"),
        ("a=2*", "'2*'"),
        ("a=2*3*1", "'2*3*1'"),
        ("a=4@8:", "'4@8:'"),
        ("a=4:3c", "'4:3c'"),
        ("a=4@8:3c", "'4@8:3c'"),
        ("a=4@8cc", "'4@8cc'"),
        ("a=1 @8", "'1 @8'"),
        ("a=1;2", "'1;2'"),
        ("a=٣@٨", "'٣@٨'"),
        ("a=²", "'²'"),
        ("a=1@8\n2", r"'1@8\n2'"),
        ("a=b=1", "'b=1'"),
        ("a=0", "request 0"),
        ("a=0@8", "request 0@8"),
        ("a=9@8", "K=8 is less than Q=9"),
        ("a=1@0", "K=0"),
        ("a=4@9:2", "D=2"),
        ("a=4@4:3", "D=3"),
        ("a=1@8c", "'c' marks"),
        ("a=8c", "'c' marks"),
        ("a=4@8c:3", "'c' marks"),
        ("a=0*1@8", "'0*1@8'"),
        ("a=99999999999999*1", "99999999999999"),
        (f"a={'9' * 5000}", "999"),
        (f"a=1@{'9' * 5000}", "999"),
        (f"a={'9' * 5000}*1", "999"),
        (f"a=4@8:{'9' * 5000}", "999"),
    ],
)
def test_a_malformed_text_gives_one_line_with_the_offending_part(text, part):
    with pytest.raises(CaseError) as error:
        parse_case(text)
    assert part in one_line(error)


@settings(max_examples=600, deadline=None)
@given(st.one_of(st.text(max_size=30), st.text("0123456789*@:c,= \n", max_size=20).map("a=".__add__)))
def test_any_text_is_a_case_or_one_line(text):
    try:
        case = parse_case(text)
    except CaseError as refusal:
        message = str(refusal)
        assert len(message.splitlines()) == 1
    else:
        assert parse_case(str(case)) == case


@pytest.mark.parametrize("name", ["", " ", "\n", "a=b", "="])
def test_a_name_that_the_grammar_cannot_carry_is_refused(name):
    with pytest.raises(CaseError) as error:
        Case(name, (Request(1, 2),))
    one_line(error)


def test_a_case_without_requests_is_refused():
    with pytest.raises(CaseError, match="'a' has no requests"):
        Case("a", ())


# Shape files.


def as_mapping(case):
    runs = []
    for request in case.requests:
        entry = {"query_len": request.query_len, "kv_len": request.kv_len}
        if request.num_draft_tokens:
            entry["num_draft_tokens"] = request.num_draft_tokens
        if request.chunked:
            entry["chunked"] = True
        if runs and {k: v for k, v in runs[-1].items() if k != "count"} == entry:
            runs[-1]["count"] = runs[-1].get("count", 1) + 1
        else:
            runs.append(entry)
    return {"name": case.name, "requests": runs}


@settings(max_examples=100, deadline=None)
@given(st.lists(CASES, min_size=1, max_size=3), st.sampled_from((".json", ".yaml", ".yml")))
def test_shape_files_agree_with_the_grammar(tmp_path_factory, cases, suffix):
    path = tmp_path_factory.getbasetemp() / f"shapes{suffix}"
    data = {"cases": [as_mapping(case) for case in cases]}
    path.write_text(json.dumps(data) if suffix == ".json" else yaml.safe_dump(data), encoding="utf-8")
    assert load_cases(path) == cases == [parse_case(str(case)) for case in load_cases(str(path))]


GOOD = {"query_len": 1, "kv_len": 8}


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (None, ["cases"]),
        ([], ["cases"]),
        ({"cases": []}, ["at least one"]),
        ({"cases": {"name": "a"}}, ["cases"]),
        ({"case": []}, ["cases"]),
        ({"cases": [5]}, ["case 0", "5"]),
        ({"cases": [{"name": "a", "requests": [GOOD]}, {"name": "b"}]}, ["case 1", "requests"]),
        ({"cases": [{"name": "a", "requests": []}]}, ["case 0", "no requests"]),
        ({"cases": [{"requests": [GOOD]}]}, ["case 0", "name"]),
        ({"cases": [{"name": None, "requests": [GOOD]}]}, ["case 0", "name", "None"]),
        ({"cases": [{"name": 7, "requests": [GOOD]}]}, ["case 0", "name", "7"]),
        ({"cases": [{"name": "a=b", "requests": [GOOD]}]}, ["case 0", "a=b"]),
        ({"cases": [{"name": "a", "requests": [GOOD, 5]}]}, ["case 0, request 1", "5"]),
        ({"cases": [{"name": "a", "requests": [{"kv_len": 8}]}]}, ["case 0, request 0", "'query_len'"]),
        ({"cases": [{"name": "a", "requests": [{"query_len": 8}]}]}, ["request 0", "'kv_len'"]),
        ({"cases": [{"name": "a", "requests": [{**GOOD, "q": 1}]}]}, ["request 0", "'q'"]),
        ({"cases": [{"name": "a", "requests": [{**GOOD, "count": 0}]}]}, ["request 0", "count is 0"]),
        ({"cases": [{"name": "a", "requests": [{**GOOD, "count": 10**14}]}]}, ["request 0", str(10**14)]),
        ({"cases": [{"name": "a", "requests": [{**GOOD, "count": True}]}]}, ["request 0", "count is True"]),
        ({"cases": [{"name": "a", "requests": [{**GOOD, "kv_len": "8"}]}]}, ["request 0", "kv_len is '8'"]),
        ({"cases": [{"name": "a", "requests": [{**GOOD, "kv_len": 8.5}]}]}, ["request 0", "kv_len is 8.5"]),
        ({"cases": [{"name": "a", "requests": [{**GOOD, "kv_len": None}]}]}, ["request 0", "kv_len is None"]),
        ({"cases": [{"name": "a", "requests": [{**GOOD, "chunked": 1}]}]}, ["request 0", "chunked is 1"]),
        ({"cases": [{"name": "a", "requests": [{"query_len": 9, "kv_len": 8}]}]}, ["request 0", "K=8"]),
        ({"cases": [{"name": "a", "requests": [{**GOOD, "chunked": True}]}]}, ["request 0", "'c' marks"]),
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_bad_shape_file_gives_one_line_naming_file_and_entry(tmp_path, data, parts, suffix):
    path = tmp_path / f"shapes{suffix}"
    path.write_text(json.dumps(data) if suffix == ".json" else yaml.safe_dump(data))
    with pytest.raises(CaseError) as error:
        load_cases(path)
    message = one_line(error)
    assert str(path) in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("broken.json", b'{"cases": ['),
        ("broken.yaml", b"cases: [\n- {"),
        ("tabs.yaml", b"cases:\n\t- a: 1\n"),
        ("latin.json", b'{"cases": "\xff"}'),
        ("empty.json", b""),
        ("empty.yaml", b""),
        ("deep.json", b"[" * 100_000),
        ("tag.yaml", b"cases: !!python/object:os.system {}"),
        ("keys.yaml", b"cases: [{name: a, requests: [{query_len: 1, kv_len: 2, 3: 4, x: 5}]}]"),
        ("list-key.yaml", b"cases: [{name: a, requests: [{[1]: 2}]}]"),
        ("digits.json", b'{"cases": [{"name": "a", "requests": [{"query_len": 1, "kv_len": ' + b"9" * 5000 + b"}]}]}"),
    ],
)
def test_unreadable_files_give_one_line(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CaseError) as error:
        load_cases(path)
    assert str(path) in one_line(error)


def test_missing_files_and_folders_give_one_line(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(CaseError) as error:
            load_cases(path)
        assert str(path) in one_line(error)


# Jitter.


@settings(max_examples=200, deadline=None)
@given(CASES, st.floats(0, 1, exclude_max=True), st.integers(0, 1 << 32), st.integers(0, 1000))
def test_jitter_keeps_queries_phases_and_bounds(case, jitter, seed, room):
    longest = max(r.kv_len for r in case.requests) + room
    jittered = jitter_kv_lens(case, jitter, longest, seed)
    assert jittered == jitter_kv_lens(case, jitter, longest, seed)
    assert jittered.name == case.name
    for before, after in zip(case.requests, jittered.requests, strict=True):
        assert (after.query_len, after.num_draft_tokens, after.phase) == (
            before.query_len,
            before.num_draft_tokens,
            before.phase,
        )
        assert after.kv_len <= longest
        assert abs(after.prefix_len - before.prefix_len) <= jitter * before.prefix_len + 1
    if not jitter:
        assert jittered == case


def test_jitter_depends_on_the_seed_and_the_name_alone():
    requests = (Request(1, 8192),) * 8
    first = jitter_kv_lens(Case("a", requests), 0.5, LONG, 1)
    assert first.requests != jitter_kv_lens(Case("b", requests), 0.5, LONG, 1).requests
    assert first.requests != jitter_kv_lens(Case("a", requests), 0.5, LONG, 2).requests
    rng = np.random.default_rng([1, zlib.crc32(b"a")])
    assert [r.prefix_len for r in first.requests] == [max(1, round(8191 * rng.uniform(0.5, 1.5))) for _ in requests]


def test_a_short_prefix_stays_a_token_long():
    case = Case("short", (Request(1, 2),) * 50 + (Request(3, 4),) * 50)
    assert {r.prefix_len for r in jitter_kv_lens(case, 0.99, LONG, 0).requests} == {1, 2}


@pytest.mark.parametrize("jitter", [-0.1, 1, 2, float("nan"), float("inf")])
def test_jitter_out_of_range_is_refused(jitter):
    with pytest.raises(CaseError, match="jitter"):
        jitter_kv_lens(parse_case("a=1@8"), jitter, 100, 0)


def test_a_request_longer_than_the_model_is_refused_by_name_and_length():
    with pytest.raises(CaseError) as error:
        jitter_kv_lens(parse_case("long=1@8,1@200"), 0.1, 100, 0)
    message = one_line(error)
    assert all(part in message for part in ("'long'", "1@200", "200", "100"))


@pytest.mark.parametrize("name", ["a\udcc2b", "a\nb", "a\x00"])
def test_a_name_that_cannot_be_printed_is_refused(name):
    with pytest.raises(CaseError, match="cannot be printed") as caught:
        parse_case(f"{name}=1@64")
    assert "\n" not in str(caught.value)


@given(st.one_of(st.none(), st.integers(4, 300_000)))
def test_the_claims_cases_fit_the_model_and_each_other(longest):
    cases = claim_cases(longest)
    assert len({case.name for case in cases}) == len(cases) in (2, 4)
    assert {case.phase for case in cases} == {"decode", "hit"}
    for case in cases:
        assert parse_case(str(case)) == case
        assert max(request.kv_len for request in case.requests) <= min(longest or 100_000, 100_000)
    if longest is None or longest >= 100_000:
        assert [str(case) for case in cases] == [
            "decode8192=32*1@8192",
            "hit8192=2048@8192",
            "decode100000=2*1@100000",
            "hit100000=2048@100000",
        ]


@pytest.mark.parametrize("longest", [1, 3])
def test_a_model_too_short_for_the_claim_is_one_line(longest):
    with pytest.raises(CaseError, match="claim's cases take contexts of 4 tokens") as error:
        claim_cases(longest)
    assert "\n" not in str(error.value)
