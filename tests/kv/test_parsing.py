"""Fills from texts, and texts from fills."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import FillError
from kvlab.kv.parsing import FILLS, parse_fill
from kvlab.kv.rules import Constant, Mix, Prefill, Random, Zeros
from kvlab.kv.scores import SCORES, Levels


@pytest.mark.parametrize(
    ("text", "fill"),
    [
        ("zeros", Zeros()),
        ("zeros()", Zeros()),
        (" random ", Random()),
        ("random()", Random()),
        ("random(0.5)", Random(0.5)),
        ("random(std=0.5, zero_fraction=0.25)", Random(0.5, 0.25)),
        ("random( zero_fraction = 1 )", Random(zero_fraction=1.0)),
        ("random(2, 0.5)", Random(2.0, 0.5)),
        ("constant", Constant(0.015)),
        ("constant(0.015)", Constant(0.015)),
        ("constant(-1e-3)", Constant(-0.001)),
        ("constant(value=0)", Constant(0.0)),
        ("prefill", Prefill()),
        ("levels", Levels()),
        ("mix(kv=random)", Mix(Random())),
        (" mix( kv = random , indexer = zeros ) ", Mix(Random(), indexer=Zeros())),
        (
            "mix(kv=random(std=0.5, zero_fraction=0.25), indexer=levels)",
            Mix(Random(0.5, 0.25), indexer=Levels()),
        ),
        (
            "mix(window=constant(1), state=zeros(), kv=random(2, 0.5))",
            Mix(Random(2.0, 0.5), state=Zeros(), window=Constant(1.0)),
        ),
    ],
)
def test_texts_that_are_fills(text, fill):
    assert parse_fill(text) == fill
    assert parse_fill(fill) is fill
    assert parse_fill(str(fill)) == fill


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("ones", "'ones'"),
        ("Random", "zeros, random, constant"),
        ("random(0.5", "'random(0.5'"),
        ("random)", "'random)'"),
        ("random(0.5)x", "unknown"),
        ("zeros(1)", "zeros takes nothing"),
        ("random(1, 0, 0)", "takes std, zero_fraction"),
        ("random(sdt=1)", "'sdt=1'"),
        ("random(std=1, std=2)", "'std=2'"),
        ("random(1, std=2)", "'std=2'"),
        ("random(std=)", "'' is not a number"),
        ("random(std=a)", "'a' is not a number"),
        ("random(std='1')", "is not a number"),
        ("random(std=True)", "'True' is not a number"),
        ("random(std=1 2)", "'1 2' is not a number"),
        ("random(std=1+1)", "'1+1' is not a number"),
        ("random(std=" + "(" * 5000 + ")", "is not a number"),
        ("random(std=0)", "std is 0"),
        ("random(std=-1)", "std is -1"),
        ("random(std=nan)", "std is nan"),
        ("random(std=inf)", "std is inf"),
        ("random(std=" + "9" * 5000 + ")", "std is inf"),
        ("random(zero_fraction=1.1)", "zero_fraction is 1.1"),
        ("random(zero_fraction=-0.1)", "zero_fraction is -0.1"),
        ("random(zero_fraction=nan)", "zero_fraction is nan"),
        ("constant(inf)", "value is inf"),
        ("constant(-1e39)", "that float32 holds"),
        ("constant(1, 2)", "takes value"),
        ("random\n(1\n)", "random"),
        ("prefill(1)", "prefill takes nothing"),
        ("levels(2)", "levels takes nothing"),
        ("mix", "kv is missing"),
        ("mix()", "add kv=random"),
        ("mix(indexer=zeros)", "kv is missing"),
        ("mix(random)", "cannot place 'random'; mix takes kv, indexer, state, window"),
        ("mix(random(std=1))", "cannot place 'random(std=1)'"),
        ("mix(kv=random, keys=zeros)", "cannot place 'keys=zeros'"),
        ("mix(kv=random, kv=zeros)", "cannot place 'kv=zeros'"),
        ("mix(kv=)", "kv='' is unknown"),
        ("mix(kv=0.5)", "kv='0.5' is unknown"),
        ("mix(kv=ones)", "kv='ones' is unknown; known are zeros, random"),
        ("mix(kv=random(std=0))", "std is 0"),
        ("mix(kv=random(std=x), indexer=zeros)", "'x' is not a number"),
        ("mix(kv=random, indexer=zeros", "unknown"),
        ("mix(kv=random), indexer=zeros)", "kv='random)' is unknown"),
        ("mix(kv=random, indexer=mix(kv=zeros))", "no mix in it"),
        ("mix(kv=" * 5000, "unknown"),
        ("mix(kv=" * 5000 + ")" * 5000, "no mix in it"),
        ("mix(kv=levels)", "levels cannot be the kv of a mix: it shapes the scores of an indexer"),
        ("mix(kv=random, state=hot_scattered)", "hot_scattered cannot be the state"),
        ("mix(kv=random, indexer=prefill)", "prefill cannot be the indexer of a mix"),
    ],
)
def test_what_is_no_fill_gives_one_line(text, part):
    with pytest.raises(FillError) as error:
        parse_fill(text)
    assert part in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=20),
        st.text("0123456789.,=()-+e nastdzerofcti_", max_size=20).map("random(".__add__),
        st.lists(st.sampled_from(("kv=", "indexer=", "random", "levels", "zeros", "(", ")", ",", "std=1", "mix")))
        .map("".join)
        .map("mix(kv=".__add__),
    )
)
def test_any_text_is_a_fill_or_one_line(text):
    try:
        fill = parse_fill(text)
    except FillError as refusal:
        message = str(refusal)
    else:
        message = str(fill)
        assert parse_fill(message) == fill
    assert len(message.splitlines()) == 1


FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
PLAIN = st.one_of(
    st.just(Zeros()),
    st.builds(Random, st.floats(0, exclude_min=True, allow_infinity=False), st.floats(0, 1)),
    st.builds(Constant, FINITE),
)
SHAPED = st.sampled_from([shape() for shape in SCORES])
MAYBE = st.none() | PLAIN


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        PLAIN, SHAPED, st.just(Prefill()), st.builds(Mix, PLAIN, st.one_of(st.none(), PLAIN, SHAPED), MAYBE, MAYBE)
    )
)
def test_the_text_of_a_fill_parses_back_to_it(fill):
    assert parse_fill(str(fill)) == fill
    assert FILLS[fill.kind] is type(fill)


def test_a_mix_built_by_hand_is_refused_as_its_text_is():
    for parts in ({"kv": Levels()}, {"kv": Mix(Random())}, {"kv": Random(), "window": Prefill()}):
        with pytest.raises(FillError, match="of a mix: ") as error:
            Mix(**parts)
        assert len(str(error.value).splitlines()) == 1
