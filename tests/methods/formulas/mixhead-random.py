"""P̄_i = Σ_j M[j, i] P_j with a fixed M."""

from formula import Plain


class Formula(Plain):
    def mix(self, patterns, queries, x):
        return self.sum_over_heads(self.w["mixing.weight"], patterns)
