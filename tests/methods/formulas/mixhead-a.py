"""P̄_i = Σ_j M[j, i] P_j."""

from formula import Plain


class Formula(Plain):
    def matrix(self, matrix):
        """M with columns of length 1 if the spec has this norm."""
        if self.spec.mixing_normalization == "l2":
            return matrix / matrix.square().sum(dim=0).sqrt()
        return matrix

    def mix(self, patterns, queries, x):
        return self.sum_over_heads(self.matrix(self.w["mixing.weight"]), patterns)
