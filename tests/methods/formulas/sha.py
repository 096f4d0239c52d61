"""One head, copied."""

from formula import Plain


class Formula(Plain):
    def query(self, i, x):
        return self.linear("q_proj", x)

    def key(self, i, y):
        return self.linear("k_proj", y)

    def value(self, i, y):
        return self.linear("v_proj", y)
