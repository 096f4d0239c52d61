"""S'_i = a_i S_i."""

from formula import Plain


class Formula(Plain):
    def mix_scores(self, scores, queries, x):
        return [[self.w["score_mixing.weight"][i] * s for s in scores[i]] for i in range(self.heads)]
