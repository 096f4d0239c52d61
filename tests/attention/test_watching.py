"""Functions that see the calls of a layer do so in one thread and while their context is open."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from fairseq_lowrank.attention import build_attention
from fairseq_lowrank.attention.watching import changing_calls


def test_calls_of_other_threads_are_not_changed():
    layer = build_attention("mixhead-b", 16, 4, self_attention=True).requires_grad_(False)
    x, threads = torch.randn(5, 2, 16), []

    def output():
        return layer(x, x, x, need_weights=False)[0]

    def halved(call):
        threads.append(threading.get_ident())
        return call.replace(v=call.v / 2)

    expected = output()
    with changing_calls({layer: halved}), ThreadPoolExecutor(1) as pool:
        own, other = output(), pool.submit(output).result()
    torch.testing.assert_close(own, expected / 2)
    torch.testing.assert_close(other, expected)
    torch.testing.assert_close(output(), expected)
    assert threads == [threading.get_ident()]


def test_contexts_end_in_any_order():
    layer = build_attention("mha", 16, 4, self_attention=True).requires_grad_(False)
    x, seen = torch.randn(5, 2, 16), []
    first, second = (changing_calls({layer: lambda call, name=name: seen.append(name) or call}) for name in "ab")
    first.__enter__()
    second.__enter__()
    layer(x, x, x)
    first.__exit__(None, None, None)
    layer(x, x, x)
    second.__exit__(None, None, None)
    layer(x, x, x)
    assert seen == ["a", "b", "b"]
