"""K_i(y) = 1/r Σ_ρ a_ρ(y)_i b_ρ(y), V_i and Q_i likewise."""

from formula import Plain, part


class Formula(Plain):
    def product(self, name, i, x, rank):
        a, b = self.linear(f"{name}_heads_proj", x), self.linear(f"{name}_proj", x)
        size = len(b) // rank
        return sum(a[r * self.heads + i] * part(b, r, size) for r in range(rank)) / rank

    def query(self, i, x):
        return self.product("q", i, x, self.spec.query_rank)

    def key(self, i, y):
        return self.product("k", i, y, self.spec.factor_rank)

    def value(self, i, y):
        return self.product("v", i, y, self.spec.factor_rank)
