"""K_i ← Σ_j A[j, i] K_j, V_i ← Σ_j C[j, i] V_j."""

from formula import Plain


class Formula(Plain):
    def key(self, i, y):
        return sum(self.w["head_map.key"][j, i] * super(Formula, self).key(j, y) for j in range(self.heads))

    def value(self, i, y):
        return sum(self.w["head_map.value"][j, i] * super(Formula, self).value(j, y) for j in range(self.heads))
