"""The chunked scan against the recurrence, token by token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.engines.reference.mamba import ssd_scan


def recurrence(x, log_decay, b, c, state):
    out = []
    for t in range(x.shape[1]):
        state = log_decay[:, t].exp()[..., None, None] * state + x[:, t].unsqueeze(-1) * b[:, t, None, None]
        out.append((state * c[:, t, None, None]).sum(-1))
    return torch.stack(out, 1), state


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.one_of(st.integers(1, 9), st.sampled_from((63, 64, 65, 128, 200))),
    st.booleans(),
    st.sampled_from((1e-3, 1.0, 30.0)),
    st.integers(0, 99),
)
def test_the_scan_equals_the_recurrence(requests, queries, resumed, rate, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(requests, *shape, generator=generator)

    x, b, c = draw(queries, 4, 3), draw(queries, 5), draw(queries, 5)
    log_decay = -rate * draw(queries, 4).abs()
    state = draw(4, 3, 5) if resumed else None
    y, end = ssd_scan(x, log_decay, b, c, state)
    parts = [part.double() for part in (x, log_decay, b, c)]
    wanted, wanted_end = recurrence(*parts, draw(4, 3, 5).double() * 0 if state is None else state.double())
    # Within a chunk decays are differences of fp32 sums of up to 64 log decays: their error grows with the rate.
    atol = 1e-4 + 5e-5 * rate
    torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=atol)
    torch.testing.assert_close(end.double(), wanted_end, rtol=1e-4, atol=atol)
