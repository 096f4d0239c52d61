"""P_i[t, s] = exp(S_i[t, s]) / (exp(a_i) + Σ_r exp(S_i[t, r]))."""

from formula import Plain


class Formula(Plain):
    def pattern(self, row, hidden, i):
        return super().pattern([*row, self.w["attention_sinks.weight"][i]], [*hidden, False], i)[:-1]
