"""Q_i ← Σ_j A[j, i] Q_j, K_i ← Σ_j B[j, i] K_j, V_i ← Σ_j C[j, i] V_j."""

from formula import Plain


class Formula(Plain):
    def mixed(self, matrix, of_head):
        return sum(matrix[j] * of_head(j) for j in range(self.heads))

    def query(self, i, x):
        return self.mixed(self.w["head_map.query"][:, i], lambda j: super(Formula, self).query(j, x))

    def key(self, i, y):
        return self.mixed(self.w["head_map.key"][:, i], lambda j: super(Formula, self).key(j, y))

    def value(self, i, y):
        return self.mixed(self.w["head_map.value"][:, i], lambda j: super(Formula, self).value(j, y))
