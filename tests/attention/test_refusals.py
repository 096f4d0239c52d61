"""Bad arguments of a layer: one line that names the argument, its value, and what would be accepted."""

import pytest
import torch

from fairseq_lowrank.attention import build_attention

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
        ({"preset": None}, "attention preset None: expected one of mha"),
        ({"mixing": 3}, "mixing=3: expected one of none"),
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
            "attn_mask of torch.int64: expected a bool or float",
        ),
        (
            (X, X, X),
            {"attn_mask": torch.zeros(5, 5).cfloat()},
            "attn_mask of torch.complex64: expected a bool or float",
        ),
    ],
)
def test_a_layer_cannot_be_given(tensors, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        build_attention("mha", 16, 4)(*tensors, **options)
    assert "\n" not in str(caught.value)
