"""S_i = (x W_Q) diag(m_i) (y W_K)ᵀ / √d_k."""

from formula import Plain


class Formula(Plain):
    def query(self, i, x):
        return self.linear("q_proj", x) * self.w["head_features"][i]

    def key(self, i, y):
        return self.linear("k_proj", y)
