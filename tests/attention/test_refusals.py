"""Bad arguments of a layer: one line that names the argument, its value, and what would be accepted."""

import pytest
import torch

from fairseq_lowrank.attention import AttentionConfig, AttentionSpec, RotaryPositions, build_attention
from fairseq_lowrank.methods.mixhead import StaticMatrix
from fairseq_lowrank.ops import AttentionMask
from fairseq_lowrank.ops.attention import triton
from fairseq_lowrank.plugin.layer import FairseqAttention

BIG = 100_000_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": "4"}, "num_heads='4': expected a positive integer"),
        ({"num_heads": 4.0}, "num_heads=4.0: expected a positive integer"),
        ({"num_heads": 0}, "num_heads=0: expected a positive integer"),
        ({"num_heads": -4}, "num_heads=-4: expected a positive integer"),
        ({"num_heads": True}, "num_heads=True: expected a positive integer"),
        ({"num_heads": None}, "num_heads=None: expected a positive integer"),
        ({"num_heads": 5}, "embed_dim=16 is not divisible by num_heads=5"),
        ({"embed_dim": 0}, "embed_dim=0: expected a positive integer"),
        ({"embed_dim": 16.0}, "embed_dim=16.0: expected a positive integer"),
        ({"embed_dim": "16"}, "embed_dim='16': expected a positive integer"),
        ({"embed_dim": BIG}, f"embed_dim={BIG}.*expected sizes that make at most 2,147,483,648"),
        ({"head_dim": 8.5}, "head_dim=8.5: expected a positive integer"),
        ({"head_dim": "8"}, "head_dim='8': expected a positive integer"),
        ({"head_dim": 0}, "head_dim=0: expected a positive integer"),
        ({"head_dim": BIG}, f"head_dim={BIG}.*expected sizes that make at most 2,147,483,648"),
        ({"kdim": 0}, "kdim=0: expected a positive integer"),
        ({"vdim": "7"}, "vdim='7': expected a positive integer"),
        ({"dropout": "0.1"}, "dropout='0.1': expected a number with 0 <= dropout < 1"),
        ({"dropout": float("nan")}, "dropout=nan: expected a number with 0 <= dropout < 1"),
        ({"dropout": None}, "dropout=None: expected a number with 0 <= dropout < 1"),
        ({"dtype": torch.int64}, "dtype=torch.int64: expected a float dtype"),
        ({"dtype": "float32"}, "dtype='float32': expected a float dtype"),
        ({"device": "gpu"}, "device='gpu': expected a device of torch"),
        ({"backend": "flash"}, "backend='flash': expected one of auto"),
        ({"preset": None}, "attention method None: expected one of mha"),
        ({"mixing": 3}, "mixing=3: expected one of none"),
        ({"mixing": StaticMatrix}, r"mixing=StaticMatrix: .* with register\(Method\(…, parts={'mixing': StaticMatrix}"),
        ({"preset": "gqa", "kv_heads": 2}, "axis kv_heads: it is called key_value_heads here. Use key_value_heads=N"),
        ({"preset": "gqa", "num_key_value_heads": 2}, "Use key_value_heads=N"),
        ({"preset": "fixedhead", "head_size": 2}, "axis head_size: it is called head_dim here. Use head_dim=N"),
        ({"causal": True}, "axis causal: masks belong to the call. Pass attn_mask=CAUSAL there"),
        ({"is_causal": True}, "Pass attn_mask=CAUSAL there"),
        ({"rope": True}, r"Use rotary=RotaryPositions\(\)"),
        ({"bach_first": True}, "unknown attention axis bach_first: .* Did you mean 'batch_first'"),
        ({"rotary": True}, r"rotary=True: expected RotaryPositions\(\), a function"),
        ({"rotary": False}, r"rotary=False: expected RotaryPositions\(\), a function"),
        ({"rotary": RotaryPositions}, r"rotary=.*RotaryPositions'>: expected RotaryPositions\(\), a function"),
        ({"qk_norm": "rms"}, "qk_norm='rms': expected True or False"),
        ({"batch_first": 1}, "batch_first=1: expected True or False"),
    ],
)
def test_a_layer_cannot_be_built_of(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        build_attention(**{"preset": "mha", "embed_dim": 16, "num_heads": 4} | arguments)
    assert "\n" not in str(caught.value)


X, INTEGERS = torch.zeros(5, 2, 16), torch.zeros(5, 2, 16, dtype=torch.int64)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ((INTEGERS, X, X), {}, "query of torch.int64: expected a float tensor"),
        ((X, INTEGERS, X), {}, "key of torch.int64: expected a float tensor"),
        ((X, X, X.bool()), {}, "value of torch.bool: expected a float tensor"),
        ((X, X[..., :7], X), {}, "key of size 7: this layer was built with kdim=16"),
        ((X, X, X[..., :7]), {}, "value of size 7: this layer was built with vdim=16"),
        ((X[0], X, X), {}, r"query of shape \[2, 16\]: expected \[time, batch, 16\]"),
        ((X, X, X[:4]), {}, r"value of shape \[4, 2, 16\]"),
        (
            (X, X, X),
            {"attn_mask": torch.zeros(5, 5, dtype=torch.int64)},
            "attn_mask of torch.int64: expected bool, true at hidden keys, or float, .* pass `mask == 0`",
        ),
        (
            (X, X, X),
            {"attn_mask": torch.zeros(5, 5).cfloat()},
            "attn_mask of torch.complex64: expected bool",
        ),
        (([X], X, X), {}, "query is a list: expected a tensor"),
        ((None, X, X), {}, "query is a NoneType: expected a tensor"),
        ((X, X, X), {"attn_mask": [[0.0]]}, "attn_mask is a list: expected a tensor"),
        ((X, X, X), {"key_padding_mask": [[False]]}, r"key_padding_mask is a list: expected a tensor \[batch, keys\]"),
        ((X, X, X), {"key_padding_mask": torch.zeros(10)}, r"key_padding_mask of shape \[10\]: expected"),
        (
            (X.half(), X.half(), X.half()),
            {},
            r"query of torch.float16: .* of torch.float32. Pass query.to\(torch.float32",
        ),
        ((X, X.double(), X), {}, "key of torch.float64: this layer has weights of torch.float32"),
        ((X, X, X.bfloat16()), {}, r"value of torch.bfloat16: .* or convert the layer with layer.to\(torch.bfloat16"),
    ],
)
def test_a_layer_cannot_be_given(tensors, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        build_attention("mha", 16, 4)(*tensors, **options)
    assert "\n" not in str(caught.value)


KEEP = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])  # as a tokenizer's attention_mask


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize(
    "options",
    [
        lambda keep: {"key_padding_mask": keep},
        lambda keep: {"attn_mask": keep[1].expand(5, 5)},
        lambda keep: {"attn_mask": AttentionMask(key_padding=keep)},
        lambda keep: {"attn_mask": AttentionMask(additive=keep[1].expand(5, 5))},
        lambda keep: {"attn_mask": AttentionMask(key_padding=keep), "key_padding_mask": keep == 0},
    ],
)
def test_a_mask_of_integers_is_refused_wherever_it_is_given(options, dtype):
    with pytest.raises(ValueError, match=f"mask.*of.*{dtype}: expected .*bool"):
        build_attention("mha", 16, 4, self_attention=True)(X, X, X, **options(KEEP.to(dtype)))


def test_fairseqs_layer_takes_padding_of_integers():
    layer = FairseqAttention(AttentionConfig(AttentionSpec(), 16, 4, self_attention=True))
    x = torch.randn(5, 2, 16)
    expected, _ = layer(x, x, x, key_padding_mask=KEEP == 0)
    for dtype in (torch.uint8, torch.int64):
        torch.testing.assert_close(layer(x, x, x, key_padding_mask=(KEEP == 0).to(dtype))[0], expected)
    hidden = torch.ones(5, 5, dtype=torch.uint8).triu(1)
    assert torch.equal(layer(x, x, x, attn_mask=hidden)[0], layer(x, x, x, attn_mask=hidden.bool())[0])


@pytest.mark.parametrize("axes", [{}, {"mixing": "static"}, {"score": "synthesizer-dense"}], ids=str)
def test_a_layer_takes_other_dtypes_where_torch_casts(axes):
    layer = build_attention("mha", 16, 4, self_attention=True, max_positions=5, **axes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = X.bfloat16()
        assert layer(half, half, half)[0].dtype == torch.bfloat16
    for projection in filter(lambda module: isinstance(module, torch.nn.Linear), layer.children()):
        projection.register_forward_pre_hook(lambda module, inputs: tuple(tensor.float() for tensor in inputs))
    assert layer(half, half, half)[0].dtype == torch.float32


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("backend", ["triton", "tiled"])
def test_a_backend_that_does_not_run_here_is_refused_with_and_without_weights(backend, weights, monkeypatch):
    monkeypatch.setattr(triton, "device_unsupported_reason", lambda device, dtype: "it has no kernels")
    layer = build_attention("mha", 16, 1, backend=backend)
    with pytest.raises(
        ValueError, match=f"backend='{backend}' does not run on cpu in torch.float32: .*use backend='auto'"
    ):
        layer(X, X, X, need_weights=weights)
