"""One key and one value for all heads."""

from formula import Plain


class Formula(Plain):
    def key(self, i, y):
        return self.linear("k_proj", y)

    def value(self, i, y):
        return self.linear("v_proj", y)
