"""Q_i = x W_Q,i T_q, K_i = y W_K,i T_k, V_i = y W_V,i T_v."""

from formula import Plain


class Formula(Plain):
    def query(self, i, x):
        return self.w["head_map.query"].T @ super().query(i, x)

    def key(self, i, y):
        return self.w["head_map.key"].T @ super().key(i, y)

    def value(self, i, y):
        return self.w["head_map.value"].T @ super().value(i, y)
