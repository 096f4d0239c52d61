"""c = RMSNorm(y W_c), K_i = c W^k_i, V_i = c W^v_i; with rotary features K_i = [c W^k_i, R_s y W_R], Q_i = [x W_Q,i, R_t x W_QR,i]."""

import math

import torch
from formula import Plain, part


class Formula(Plain):
    @property
    def turning(self):
        """The number of rotary features."""
        return self.spec.rotary_dim or 0

    def latent(self, y):
        latent = self.w["latent_proj.weight"] @ y
        size = (latent.square().mean() + torch.finfo(torch.double).eps).sqrt()
        return latent / size * self.w["latent_norm.weight"]

    def query(self, i, x):
        return part(self.linear("q_proj", x), i, self.d_k + self.turning)

    def key(self, i, y):
        key = part(self.w["k_proj.weight"] @ self.latent(y), i, self.d_k)
        return torch.cat([key, self.w["rotary_key_proj.weight"] @ y]) if self.turning else key

    def value(self, i, y):
        return part(self.w["v_proj.weight"] @ self.latent(y), i, self.d_v)

    def turned(self, features, position):
        """The last features, turned by a position: pairs j and j + e/2 by the angle position / 10000^(2j / e)."""
        result, half = features.clone(), self.turning // 2
        for j in range(half):
            angle = position / 10000 ** (2 * j / self.turning)
            first, second = features[self.d_k + j], features[self.d_k + half + j]
            result[self.d_k + j] = first * math.cos(angle) - second * math.sin(angle)
            result[self.d_k + half + j] = second * math.cos(angle) + first * math.sin(angle)
        return result

    def score(self, i, q, k, t, s):
        return self.turned(q, t) @ self.turned(k, s) / math.sqrt(self.d_k + self.turning)
