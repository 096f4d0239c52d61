"""M_t = I + Σ_ρ w1_ρ(x_t) w2_ρ(x_t)ᵀ + diag(tanh(x_t W_d)), before and after the softmax."""

import torch
from formula import Plain, part


class Formula(Plain):
    def matrix(self, axis, x):
        first, second = self.w[f"{axis}.first"] @ x, self.w[f"{axis}.second"] @ x
        matrix = torch.eye(self.heads, dtype=x.dtype) + torch.diag(torch.tanh(self.w[f"{axis}.diagonal"] @ x))
        for r in range(len(first) // self.heads):
            matrix = matrix + torch.outer(part(first, r, self.heads), part(second, r, self.heads))
        return matrix

    def mix_scores(self, scores, queries, x):
        return self.sum_over_heads(self.matrix("score_mixing", x), scores)

    def mix(self, patterns, queries, x):
        return self.sum_over_heads(self.matrix("mixing", x), patterns)
