"""Q_i = (x C) U_i, one key and one value for all heads."""

from formula import Plain, part


class Formula(Plain):
    def query(self, i, x):
        return part(self.linear("q_proj", self.w["q_latent_proj.weight"] @ x), i, self.d_k)

    def key(self, i, y):
        return self.linear("k_proj", y)

    def value(self, i, y):
        return self.linear("v_proj", y)
