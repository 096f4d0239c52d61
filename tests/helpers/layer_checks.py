"""What holds of every attention layer: its formula under masks, and decoding with beams that are reordered."""

import brute_force
import torch

from fairseq_lowrank.attention import CAUSAL


def equals_the_formula(layer, x, padding):
    """Compare outputs, weights, scores and values ``[n, B, d]`` with the brute force, under causality and padding ``[B, n]``."""
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1) | padding.cpu()[:, None, None, :]
    expected = brute_force.layer(layer, x, x, x, hidden=hidden)
    options = {"attn_mask": CAUSAL, "key_padding_mask": padding}
    output, weights = layer(x, x, x, need_head_weights=True, **options)
    torch.testing.assert_close(output.cpu(), expected[0])
    torch.testing.assert_close(weights.cpu(), expected[1].transpose(0, 1))
    torch.testing.assert_close(layer(x, x, x, need_weights=False, **options)[0].cpu(), expected[0])
    scores, values = layer(x, x, x, before_softmax=True, **options)
    torch.testing.assert_close(scores.cpu(), expected[2].flatten(0, 1))
    torch.testing.assert_close(values.cpu(), expected[3].flatten(0, 1))


def follows_beams(layer, x, recording):
    """Decode five steps ``[5, 3, d]``, with beams reordered after three; compare with the whole pass, and return the state."""
    state, order = {}, torch.tensor([2, 0, 0], device=x.device)
    with torch.set_grad_enabled(recording):
        for step in x[:3].split(1):
            layer(step, step, step, incremental_state=state)
        layer.reorder_incremental_state(state, order)
        whole = torch.cat((x[:3, order], x[3:]))
        steps = [layer(step, step, step, incremental_state=state)[0] for step in x[3:].split(1)]
    torch.testing.assert_close(torch.cat(steps), layer(whole, whole, whole, attn_mask=CAUSAL)[0][3:])
    return state
