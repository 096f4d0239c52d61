"""S_i = RMSNorm(M_i x)·RMSNorm(y) / √d, with M_i[α·e + β, γ·e + ε] = R[(i, β), α, γ] L[γ, ε, (i, β)] and c·e = d."""

import math

import torch
from formula import Plain


def normalised(x):
    return x / (x.square().mean() + 1e-6).sqrt()


class Formula(Plain):
    def query(self, i, x):
        first, second = self.w["query_first"], self.w["query_second"]
        blocks, size, _ = first.shape
        places = len(self.w["query_scale"]) // blocks
        mapped = torch.zeros(blocks * places, dtype=x.dtype)
        for alpha in range(blocks):
            for beta in range(places):
                for gamma in range(blocks):
                    inner = sum(x[gamma * size + e] * first[gamma, e, i * places + beta] for e in range(size))
                    mapped[alpha * places + beta] += second[i * places + beta, alpha, gamma] * inner
        return normalised(mapped) * self.w["query_scale"]

    def key(self, i, y):
        return normalised(y)

    def score(self, i, q, k, t, s):
        return q @ k / math.sqrt(len(k))
