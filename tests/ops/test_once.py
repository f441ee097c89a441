"""What follows from numbers alone is made once, for real tensors."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from longspan.ops import once
from longspan.ops.once import made_once


@pytest.fixture
def counted():
    """A function that remembers, and what it was asked to make."""
    made = []

    @made_once
    def count(device, number):
        made.append(number)
        return (torch.arange(number, device=device),)

    return count, made


def test_it_is_made_once(counted):
    count, made = counted
    like = torch.zeros(1)
    assert count(like, 3)[0] is count(like, 3)[0]
    assert count(like, 4)[0].tolist() == [0, 1, 2, 3]
    assert made == [3, 4]


def test_not_from_a_call_without_numbers_nor_for_one(counted):
    count, made = counted
    with FakeTensorMode():
        assert isinstance(count(torch.zeros(1), 3)[0], FakeTensor)
    assert count(torch.zeros(1), 3)[0].tolist() == [0, 1, 2]
    with FakeTensorMode():
        assert isinstance(count(torch.zeros(1), 3)[0], FakeTensor)
    assert made == [3, 3, 3]
    like = torch.zeros(1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        count(like, 4)
    assert count(like, 4)[0].tolist() == [0, 1, 2, 3]


def test_what_was_made_for_inference_serves_training(counted):
    count, _ = counted
    with torch.inference_mode():
        found = count(torch.zeros(1), 3)[0]
    assert not found.is_inference()


@pytest.mark.parametrize(("name", "most"), [("_MOST", 2), ("_MOST_BYTES", 8 * (4 + 5))])
def test_the_oldest_are_forgotten(counted, name, most, monkeypatch):
    monkeypatch.setattr(once, name, most)
    count, made = counted
    like = torch.zeros(1)
    for number in (3, 4, 5, 4, 3):
        count(like, number)
    assert made == [3, 4, 5, 3]


def test_threads_do_not_forget_for_one_another(counted, monkeypatch):
    monkeypatch.setattr(once, "_MOST", 1)
    count, _ = counted
    like, before = torch.zeros(1), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda n: len(count(like, n % 2)[0]), range(20_000)))
    finally:
        sys.setswitchinterval(before)
    assert found == [0, 1] * 10_000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_captured_graph_keeps_what_it_reads(counted, monkeypatch):
    monkeypatch.setattr(once, "_MOST", 1)
    count, made = counted
    like = torch.zeros(1, device="cuda")
    count(like, 1000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = count(like, 1000)[0].sum()
    count(like, 1001)  # forgets the first
    torch.full((1000,), 7, device="cuda")  # would take its memory
    graph.replay()
    assert int(total) == 499_500
    assert made == [1000, 1001]
