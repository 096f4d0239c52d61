"""K_i = V_i = part i of the input."""

from formula import Plain, part


class Formula(Plain):
    def key(self, i, y):
        return part(y, i, self.d_k)

    def value(self, i, y):
        return part(y, i, self.d_k)
