"""Tables of owned blocks, beside plain loops over requests, blocks and slots."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.kv.owned import OwnedBlocks


def owned_blocks(counts, gap):
    begins = 1 + np.cumsum([0, *(count + gap for count in counts[:-1])]) if counts else np.empty(0, np.int64)
    ranges = np.stack([begins, begins + np.array(counts, np.int64)], axis=1)
    batch = SimpleNamespace(req_ids=list(range(len(counts))), expected=dict.fromkeys(range(len(counts)), (1, 5, True)))
    return OwnedBlocks(batch, {0: ranges}, 1000, torch.device("cpu"))


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 2), st.sampled_from((1, 2, 16)), st.floats(0, 1))
def test_blocks_and_shares_stand_request_by_request(counts, gap, tokens, share):
    owned = owned_blocks(counts, gap)
    assert owned.computed == [6] * len(counts)
    blocks, requests, ends, slots = [], [], [], 0
    for request, (begin, end) in enumerate(owned.ranges[0].tolist()):
        blocks += [2 * block + half for block in range(begin, end) for half in range(2)]
        requests += [request] * (end - begin)
        ends += [slots + round(share * (end - begin) * tokens)] * (end - begin)
        slots += (end - begin) * tokens
    assert owned.kernel_blocks(0, 2).tolist() == blocks
    for _ in range(2):
        assert owned.shares(0, tokens, share).tolist() == [requests, ends]
