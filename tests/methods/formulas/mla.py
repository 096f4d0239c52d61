"""c = RMSNorm(y W_c), K_i = c W^k_i, V_i = c W^v_i."""

import torch
from formula import Plain, part


class Formula(Plain):
    def latent(self, y):
        latent = self.w["latent_proj.weight"] @ y
        size = (latent.square().mean() + torch.finfo(torch.double).eps).sqrt()
        return latent / size * self.w["latent_norm.weight"]

    def key(self, i, y):
        return part(self.w["k_proj.weight"] @ self.latent(y), i, self.d_k)

    def value(self, i, y):
        return part(self.w["v_proj.weight"] @ self.latent(y), i, self.d_v)
