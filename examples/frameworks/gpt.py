"""A small GPT as nanochat writes it, with mixing: rotary positions, normalised queries, shared keys, a window, a cache.

``python examples/frameworks/gpt.py FILE --method mixhead-a --updates 200`` trains it on the bytes of a text file, and samples.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from fairseq_lowrank.attention import SlidingWindow, build_core, muon_split, parameter_groups

BYTES = 256


def rope(x, first):
    """Rotate ``x [B, T, H, D]`` by its positions, which begin at ``first``."""
    half = x.size(-1) // 2
    angles = torch.arange(first, first + x.size(1), device=x.device)[:, None]
    angles = angles / 10000.0 ** (torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def norm(x):
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads, groups, window, method):
        super().__init__()
        self.size, self.mask = width // heads, SlidingWindow(window)
        self.c_q = nn.Linear(width, width, bias=False)
        self.c_k = nn.Linear(width, groups * self.size, bias=False)
        self.c_v = nn.Linear(width, groups * self.size, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)
        self.core = build_core(method, heads, self.size, layout="BTHD")  # the one line more than without mixing

    def forward(self, x, cache=None):
        q, k, v = (linear(x).unflatten(-1, (-1, self.size)) for linear in (self.c_q, self.c_k, self.c_v))
        first = cache[0].size(1) if cache else 0
        own = norm(q)
        q, k = rope(own, first), rope(norm(k), first)
        if cache is not None:
            cache[:] = (torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)) if cache else (k, v)
            k, v = cache
        y = self.core(q, k, v, self.mask, inputs=x, mixing_queries=own)  # in place of flash_attn_func
        return self.c_proj(y.flatten(2))


class Block(nn.Module):
    def __init__(self, width, *attention):
        super().__init__()
        self.attn = CausalSelfAttention(width, *attention)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x, cache=None):
        x = x + self.attn(norm(x), cache)
        return x + self.c_out(self.c_fc(norm(x)).relu().square())


class GPT(nn.Module):
    def __init__(self, method, width=128, layers=3, heads=8, groups=2, window=64):
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(BYTES, width), nn.Linear(width, BYTES, bias=False)
        self.blocks = nn.ModuleList(Block(width, heads, groups, window, method) for _ in range(layers))

    def forward(self, tokens, caches=None):
        x = norm(self.wte(tokens))
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache)
        return self.lm_head(norm(x)).float()

    @torch.no_grad()
    def sample(self, tokens, count):
        """Return ``tokens [1, T]`` with the ``count`` likeliest next ones, step by step with caches."""
        caches: list[list] = [[] for _ in self.blocks]
        new = tokens
        for _ in range(count):
            new = self(new, caches)[:, -1:].argmax(dim=-1)
            tokens = torch.cat([tokens, new], dim=1)
        return tokens


def train(text, method, updates, *, length=128, batch=8, seed=1):
    """Return a GPT that was trained on bytes, and its losses in nats a byte."""
    torch.manual_seed(seed)
    model, losses = GPT(method), []
    # Muon takes muon_split(model)[0]; this file keeps AdamW for all, without decay for mixing.
    optimizer = torch.optim.AdamW(parameter_groups(model, learning_rate=2e-3, weight_decay=0.1))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    for _ in range(updates):
        starts = torch.randint(len(data) - length, (batch,))
        rows = torch.stack([data[start : start + length + 1] for start in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--method", default="mixhead-a", help="such as mha, mixhead-a or score-mixing")
    parser.add_argument("--updates", type=int, default=200)
    options = parser.parse_args()
    with open(options.file, "rb") as file:
        text = file.read()
    model, losses = train(text, options.method, options.updates)
    muon, others = muon_split(model)
    print(f"{options.method}: loss {losses[0]:.3f}, after {options.updates} updates {sum(losses[-10:]) / 10:.3f}")
    print(f"Muon may take {sum(p.numel() for p in muon):,} numbers, AdamW keeps {sum(p.numel() for p in others):,}")
    prompt = torch.tensor([list(text[:16])])
    print(bytes(model.sample(prompt, 64)[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
