"""S'_i = Σ_j L[j, i] S_j."""

from formula import Plain


class Formula(Plain):
    def mix_scores(self, scores, queries, x):
        return self.sum_over_heads(self.w["score_mixing.weight"], scores)
