"""The rivals' formulas, one number after another in float64, from nothing but a layer's parameters."""

import torch


def weights_of(layer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().double() for name, tensor in layer.state_dict().items()}


def linear(w: dict, name: str, x: torch.Tensor) -> torch.Tensor:
    """The projection ``name`` of one vector."""
    y = w[f"{name}.weight"] @ x
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def part(vector: torch.Tensor, index: int, size: int) -> torch.Tensor:
    return vector[index * size : (index + 1) * size]


def query_of(preset: str, w: dict, layer, i: int, x: torch.Tensor) -> torch.Tensor:
    d_k = layer.head_dim
    if preset == "collaborative":
        return linear(w, "q_proj", x) * w["head_features"][i]
    if preset == "mfa":
        return part(linear(w, "q_proj", w["q_latent_proj.weight"] @ x), i, d_k)
    if preset == "tpa":
        return product(w, "q_heads_proj", "q_proj", layer, i, x, layer.projection.query_rank)
    q = part(linear(w, "q_proj", x), i, d_k)
    return w["head_map.query"].T @ q if preset == "knocking-linear" else q


def product(w: dict, heads: str, features: str, layer, i: int, x: torch.Tensor, rank: int) -> torch.Tensor:
    a, b = linear(w, heads, x), linear(w, features, x)
    size = len(b) // rank
    return sum(a[r * layer.num_heads + i] * part(b, r, size) for r in range(rank)) / rank


def key_and_value(preset: str, w: dict, layer, i: int, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The key and value of head i at a position whose input is y."""
    heads, d_k, d_v = layer.num_heads, layer.head_dim, layer.projection.dims.value_dim
    if preset == "mla":
        latent = w["latent_proj.weight"] @ y
        latent = latent / (latent.square().mean() + torch.finfo(latent.dtype).eps).sqrt() * w["latent_norm.weight"]
        return part(w["k_proj.weight"] @ latent, i, d_k), part(w["v_proj.weight"] @ latent, i, d_v)
    if preset == "collaborative":
        return linear(w, "k_proj", y), part(linear(w, "v_proj", y), i, d_v)
    if preset == "mfa":
        return linear(w, "k_proj", y), linear(w, "v_proj", y)
    if preset == "lrkv":
        rank = layer.projection.factor_rank
        own = [
            w[f"{name}_factors"][i].T @ part(w[f"{name[0]}_factor_proj.weight"] @ y, i, rank)
            for name in ("key", "value")
        ]
        return linear(w, "k_proj", y) + own[0], linear(w, "v_proj", y) + own[1]
    if preset == "tpa":
        rank = layer.projection.factor_rank
        return product(w, "k_heads_proj", "k_proj", layer, i, y, rank), product(
            w, "v_heads_proj", "v_proj", layer, i, y, rank
        )
    keys = [part(linear(w, "k_proj", y), j, d_k) for j in range(heads)]
    values = [part(linear(w, "v_proj", y), j, d_v) for j in range(heads)]
    if preset == "knocking-linear":
        return w["head_map.key"].T @ keys[i], w["head_map.value"].T @ values[i]
    if preset == "mea":
        return (
            sum(w["head_map.key"][j, i] * keys[j] for j in range(heads)),
            sum(w["head_map.value"][j, i] * values[j] for j in range(heads)),
        )
    return keys[i], values[i]


def dynamic(w: dict, axis: str, x: torch.Tensor, heads: int) -> torch.Tensor:
    """M_t of dynamic mixing."""
    first, second = w[f"{axis}.first"] @ x, w[f"{axis}.second"] @ x
    matrix = torch.eye(heads, dtype=x.dtype) + torch.diag(torch.tanh(w[f"{axis}.diagonal"] @ x))
    for r in range(len(first) // heads):
        matrix = matrix + torch.outer(part(first, r, heads), part(second, r, heads))
    return matrix


def softmax(scores: list) -> list:
    """Over the keys that are not hidden (None); zeros if all are."""
    seen = [score for score in scores if score is not None]
    if not seen:
        return [torch.zeros((), dtype=torch.double)] * len(scores)
    top = max(seen)
    total = sum((score - top).exp() for score in seen)
    return [torch.zeros((), dtype=torch.double) if score is None else (score - top).exp() / total for score in scores]


def attend(preset: str, layer, query: torch.Tensor, key: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The output ``[T, B, E]`` for ``query [T, B, E]``, ``key [S, B, E]`` (values too), and ``hidden [B, T, S]``."""
    w, heads = weights_of(layer), layer.num_heads
    query, key = query.double(), key.double()
    output = torch.zeros(len(query), query.size(1), layer.embed_dim, dtype=torch.double)
    scale = layer.head_dim**-0.5
    for b in range(query.size(1)):
        keys, values = [], []
        for i in range(heads):
            pairs = [key_and_value(preset, w, layer, i, y) for y in key[:, b]]
            keys.append([pair[0] for pair in pairs])
            values.append([pair[1] for pair in pairs])
        for t, x in enumerate(query[:, b]):
            count = 2 * heads if preset == "diff" else heads
            scores = []
            for i in range(count):
                q = query_of(preset, w, layer, i, x)
                scores.append([q @ k * scale for k in keys[i * heads // count]])
            if preset == "dcmha":
                before = dynamic(w, "score_mixing", x, heads)
                scores = [
                    [sum(before[j, i] * scores[j][s] for j in range(heads)) for s in range(len(key))]
                    for i in range(heads)
                ]
            scores = [[None if hidden[b, t, s] else row[s] for s in range(len(key))] for row in scores]
            patterns = [softmax(row) for row in scores]
            if preset == "dcmha":
                after = dynamic(w, "mixing", x, heads)
                patterns = [
                    [sum(after[j, i] * patterns[j][s] for j in range(heads)) for s in range(len(key))]
                    for i in range(heads)
                ]
            outputs = [
                sum(patterns[i][s] * values[i * heads // count][s] for s in range(len(key))) for i in range(count)
            ]
            outputs = finalize_heads(
                preset, w, layer, outputs, x, [values[i][t + len(key) - len(query)] for i in range(heads)]
            )
            output[t, b] = linear(w, "out_proj", torch.cat(outputs))
    return output


def finalize_heads(preset: str, w: dict, layer, outputs: list, x: torch.Tensor, own: list) -> list:
    """What happens to the outputs of heads at one position; ``own`` are its values."""
    heads, d_v = layer.num_heads, layer.projection.dims.value_dim
    if preset in ("gated", "gated-head"):
        gates = layer.head_output.scale * torch.sigmoid(w["head_output.weight"] @ x)
        return [outputs[i] * (gates[i] if preset == "gated-head" else part(gates, i, d_v)) for i in range(heads)]
    if preset == "diff":
        factors = torch.sigmoid(w["head_output.weight"] @ x)
        return [outputs[2 * i] - factors[i] * outputs[2 * i + 1] for i in range(heads)]
    if preset == "xsa":
        alpha = torch.tanh(w["head_output.weight"])
        directions = [value / value.norm() for value in own]
        return [o - a * (o @ v) * v for o, a, v in zip(outputs, alpha, directions, strict=True)]
    return outputs
