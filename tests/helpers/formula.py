"""Plain attention, one number after another in float64, for the formulas of methods in tests/methods/formulas.

A formula is a class ``Formula(Plain)`` that overrides what differs. It reads a layer's parameters by name and the sizes that were chosen,
and computes nothing with the package.
"""

import importlib.util
import math
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parents[1] / "methods" / "formulas"


def load(name):
    """The formula of a method, from the file of its name."""
    file = FOLDER / f"{name}.py"
    assert file.is_file(), f"{name} has no formula: write {file.relative_to(FOLDER.parents[2])}"
    spec = importlib.util.spec_from_file_location(f"formula_{name.replace('-', '_')}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Formula


def part(vector, index, size):
    """Entries ``index * size`` and the following of a vector."""
    return vector[index * size : (index + 1) * size]


class Plain:
    """Head i of h: P_i = softmax(Q_i K_iᵀ / √d_k), O_i = P_i V_i, output = Σ_i O_i W_O,i.

    Args:
        layer: its ``state_dict`` and sizes are read.

    Attributes:
        w: the parameters by name.
        heads, query_heads: heads of outputs, and of queries.
        d_k, d_v: sizes of queries and keys, and of values.
    """

    queries_per_head = 1

    def __init__(self, layer):
        self.w = {name: tensor.detach().double() for name, tensor in layer.state_dict().items()}
        self.spec, self.heads, self.embed_dim = layer.spec, layer.num_heads, layer.embed_dim
        self.query_heads = self.heads * self.queries_per_head
        self.d_k = layer.spec.head_dim or layer.embed_dim // layer.num_heads
        self.d_v = layer.spec.value_dim or self.d_k

    def linear(self, name, x):
        """The projection ``name`` of one vector."""
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def query(self, i, x):
        """The query of head i for the input x."""
        return part(self.linear("q_proj", x), i, self.d_k)

    def key(self, i, y):
        """The key that head i of queries reads, for the input y."""
        return part(self.linear("k_proj", y), i // self.queries_per_head, self.d_k)

    def value(self, i, y):
        return part(self.linear("v_proj", y), i // self.queries_per_head, self.d_v)

    def score(self, i, q, k, t, s):
        """The score of head i for a query at position t and a key at position s."""
        return q @ k / math.sqrt(self.d_k)

    def mix_scores(self, scores, queries, x):
        """Scores ``[heads][keys]`` of one query, before they are masked; ``queries`` are those of all heads."""
        return scores

    def normalise(self, scores):
        """Probabilities of the scores of visible keys."""
        top = max(scores)
        terms = [(score - top).exp() for score in scores]
        return [term / sum(terms) for term in terms]

    def mix(self, patterns, queries, x):
        """Probabilities ``[heads][keys]`` of one query."""
        return patterns

    def finish(self, outputs, x, own):
        """Outputs of heads at one position, before the output projection; ``own`` are its values."""
        return outputs

    def sum_over_heads(self, matrix, rows):
        """Σ_j M[j, i] of rows j, for each i."""
        return [
            [sum(matrix[j, i] * rows[j][s] for j in range(len(rows))) for s in range(len(rows[0]))]
            for i in range(len(rows))
        ]

    def pattern(self, row, hidden, i):
        """Probabilities of all keys in a row of head i; zeros if all are hidden."""
        seen = [s for s in range(len(row)) if not hidden[s]]
        found = dict(zip(seen, self.normalise([row[s] for s in seen]) if seen else (), strict=True))
        return [found.get(s, torch.zeros((), dtype=torch.double)) for s in range(len(row))]

    def __call__(self, query, key, hidden):
        """The output ``[T, B, d]`` for ``query [T, B, d]``, ``key [S, B, d]`` (values too), and ``hidden [B, T, S]``."""
        query, key = query.double(), key.double()
        output = torch.zeros(len(query), query.size(1), self.embed_dim, dtype=torch.double)
        every, first = range(self.query_heads), len(key) - len(query)
        for b in range(query.size(1)):
            keys = [[self.key(i, y) for y in key[:, b]] for i in every]
            values = [[self.value(i, y) for y in key[:, b]] for i in every]
            for t, x in enumerate(query[:, b]):
                queries = [self.query(i, x) for i in every]
                scores = [[self.score(i, queries[i], keys[i][s], t + first, s) for s in range(len(key))] for i in every]
                scores = self.mix_scores(scores, queries, x)
                patterns = [self.pattern(row, hidden[b, t], i) for i, row in enumerate(scores)]
                patterns = self.mix(patterns, queries, x)
                outputs = [sum(patterns[i][s] * values[i][s] for s in range(len(key))) for i in every]
                own = [values[i][t + first] for i in every] if first >= 0 else None
                output[t, b] = self.linear("out_proj", torch.cat(self.finish(outputs, x, own)))
        return output
