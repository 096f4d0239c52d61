"""O_i[t] − tanh(α_i) (O_i[t] · v̂_t) v̂_t with v̂_t = V_i[t] / ‖V_i[t]‖."""

import torch
from formula import Plain


class Formula(Plain):
    def finish(self, outputs, x, own):
        alpha = torch.tanh(self.w["head_output.weight"])
        directions = [value / value.norm() for value in own]
        return [o - a * (o @ v) * v for o, a, v in zip(outputs, alpha, directions, strict=True)]
