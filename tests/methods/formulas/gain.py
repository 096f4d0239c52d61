"""P̄_i = w_i P_i."""

from formula import Plain


class Formula(Plain):
    def mix(self, patterns, queries, x):
        return [[self.w["mixing.weight"][i] * p for p in patterns[i]] for i in range(self.heads)]
