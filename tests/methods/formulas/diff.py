"""O_i = P_2i V_i − λ P_2i+1 V_i: λ = σ(x w_i) in version 2; in version 1 one λ, two keys, and (1 − λ_init) times a norm of heads."""

import math

import torch
from formula import Plain, part


class Formula(Plain):
    queries_per_head = 2

    @property
    def first_version(self):
        return self.spec.diff_version == "1"

    def key(self, i, y):
        return part(self.linear("k_proj", y), i, self.d_k) if self.first_version else super().key(i, y)

    def finish(self, outputs, x, own):
        if not self.first_version:
            factors = torch.sigmoid(self.w["head_output.weight"] @ x)
            return [outputs[2 * i] - factors[i] * outputs[2 * i + 1] for i in range(self.heads)]
        q1, k1, q2, k2 = self.w["head_output.vectors"]
        initial = self.w["head_output.initial"].item()
        factor = math.exp(q1 @ k1) - math.exp(q2 @ k2) + initial
        found = []
        for i in range(self.heads):
            head = outputs[2 * i] - factor * outputs[2 * i + 1]
            size = (head.square().mean() + 1e-5).sqrt()
            found.append((1 - initial) * head / size * self.w["head_output.norm"])
        return found
