"""Q_i = x W_Q + e^q_i, K_i = y W_K + e^k_i, V_i = y W_V + e^v_i."""

from formula import Plain


class Formula(Plain):
    def query(self, i, x):
        return self.linear("q_proj", x) + self.w["head_embeddings.query"][i]

    def key(self, i, y):
        return self.linear("k_proj", y) + self.w["head_embeddings.key"][i]

    def value(self, i, y):
        return self.linear("v_proj", y) + self.w["head_embeddings.value"][i]
