"""Tensors here are tiny: one thread is faster than two that wait for each other."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)
