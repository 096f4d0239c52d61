"""V_i = K_i."""

from formula import Plain


class Formula(Plain):
    def value(self, i, y):
        return self.key(i, y)
