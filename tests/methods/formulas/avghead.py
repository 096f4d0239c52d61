"""P̄_i = 1/h Σ_j P_j."""

from formula import Plain


class Formula(Plain):
    def mix(self, patterns, queries, x):
        mean = [sum(row[s] for row in patterns) / self.heads for s in range(len(patterns[0]))]
        return [mean] * self.heads
