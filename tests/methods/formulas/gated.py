"""O_i = 2σ(x W_i) ⊙ P_i V_i."""

import torch
from formula import Plain, part


class Formula(Plain):
    def finish(self, outputs, x, own):
        scale = 1 if self.spec.gate_start == "half" else 2
        gates = scale * torch.sigmoid(self.w["head_output.weight"] @ x)
        return [outputs[i] * part(gates, i, self.d_v) for i in range(self.heads)]
