"""S_i[t, s] − m_i |t − s|, with the slopes of the authors' code."""

from formula import Plain


def slopes(heads):
    """The slopes of ``attention_with_linear_biases``, number by number."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    if power == heads:
        return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
    return slopes(power) + slopes(2 * power)[::2][: heads - power]


class Formula(Plain):
    def score(self, i, q, k, t, s):
        return super().score(i, q, k, t, s) - slopes(self.query_heads)[i] * abs(t - s)
