"""Q_i = x W_Q ⊙ (1 + e^q_i), K_i = y W_K ⊙ (1 + e^k_i), V_i = y W_V ⊙ (1 + e^v_i)."""

from formula import Plain


class Formula(Plain):
    def query(self, i, x):
        return self.linear("q_proj", x) * (1 + self.w["head_embeddings.query"][i])

    def key(self, i, y):
        return self.linear("k_proj", y) * (1 + self.w["head_embeddings.key"][i])

    def value(self, i, y):
        return self.linear("v_proj", y) * (1 + self.w["head_embeddings.value"][i])
