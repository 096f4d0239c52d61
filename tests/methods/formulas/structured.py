"""S_i = LayerNorm(M_i x)·y / √d, with M_i[a·c + β, γ·e + ε] = Σ of one path: R_i[β, α, γ] L[γ, ε, (i, β)]."""

import math

import torch
from formula import Plain


class Formula(Plain):
    def query(self, i, x):
        first, second = self.w["query_first"], self.w["query_second"]
        blocks, size, _ = first.shape
        outputs = second.shape[1]
        mapped = torch.zeros(outputs * blocks, dtype=x.dtype)
        for alpha in range(outputs):
            for beta in range(blocks):
                for gamma in range(blocks):
                    inner = sum(x[gamma * size + e] * first[gamma, e, i * blocks + beta] for e in range(size))
                    mapped[alpha * blocks + beta] += second[i * blocks + beta, alpha, gamma] * inner
        centred = mapped - mapped.mean()
        return centred / (centred.square().mean() + 1e-5).sqrt() * self.w["query_norm.weight"]

    def key(self, i, y):
        return y

    def score(self, i, q, k, t, s):
        return q @ k / math.sqrt(len(k))
