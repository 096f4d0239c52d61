"""P_i = softmax(Q_i K_iᵀ / √d_k), O_i = P_i V_i."""

from formula import Plain


class Formula(Plain):
    """Plain attention."""
