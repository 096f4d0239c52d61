"""P_i[t, s] ∝ exp(a) σ(a)."""

from formula import Plain


class Formula(Plain):
    def normalise(self, scores):
        terms = [score.exp() / (1 + (-score).exp()) for score in scores]
        return [term / sum(terms) for term in terms]
