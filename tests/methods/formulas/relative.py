"""S_i[t, s] = ((q_t + u_i)·k_s + (q_t + v_i)·r_{t−s}) / √d_k with r_δ = W_R,i R_δ and R_δ sinusoidal."""

import math

import torch
from formula import Plain, part


class Formula(Plain):
    def score(self, i, q, k, t, s):
        angles = [(t - s) / 10000 ** (2 * j / self.embed_dim) for j in range(self.embed_dim // 2)]
        table = torch.tensor([f(angle) for f in (math.sin, math.cos) for angle in angles], dtype=torch.double)
        position = part(self.w["pos_proj.weight"] @ table, i, self.d_k)
        u, v = self.w["pos_bias_u"][i], self.w["pos_bias_v"][i]
        return ((q + u) @ k + (q + v) @ position) / math.sqrt(self.d_k)
