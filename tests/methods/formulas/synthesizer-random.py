"""S_i[t, s] = R_i[t, s]."""

from formula import Plain


class Formula(Plain):
    def query(self, i, x):
        return None

    def key(self, i, y):
        return None

    def score(self, i, q, k, t, s):
        return self.w["synthesizer.weight"][i, t, s]
