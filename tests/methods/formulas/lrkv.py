"""K_i = y W_K + y A_i B_i, V_i = y W_V + y A'_i B'_i."""

from formula import Plain, part


class Formula(Plain):
    def own(self, name, i, y):
        rank = self.spec.factor_rank
        return self.w[f"{name}_factors"][i].T @ part(self.w[f"{name[0]}_factor_proj.weight"] @ y, i, rank)

    def key(self, i, y):
        return self.linear("k_proj", y) + self.own("key", i, y)

    def value(self, i, y):
        return self.linear("v_proj", y) + self.own("value", i, y)
