"""M_t[j, i] = q_{t,j} · W^M[:, i] + B[j, i], P̄_i[t] = Σ_j M_t[j, i] P_j[t]."""

from formula import Plain


class Formula(Plain):
    def matrix(self, matrix):
        """M with columns of length 1 if the spec has this norm."""
        if self.spec.mixing_normalization == "l2":
            return matrix / matrix.square().sum(dim=0).sqrt()
        return matrix

    def mix(self, patterns, queries, x):
        matrix = self.w["mixing.weight"].clone()
        for j in range(self.heads):
            for i in range(self.heads):
                matrix[j, i] += queries[j] @ self.w["mixing.query_weight"][:, i]
        return self.sum_over_heads(self.matrix(matrix), patterns)
