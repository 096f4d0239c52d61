"""Head i of queries reads the key and value of head ⌊i·g/h⌋."""

from formula import Plain


class Formula(Plain):
    def group(self, i):
        return i * self.spec.key_value_heads // self.heads

    def key(self, i, y):
        return super().key(self.group(i), y)

    def value(self, i, y):
        return super().value(self.group(i), y)
