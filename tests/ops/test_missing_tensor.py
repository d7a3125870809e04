"""None in place of a tensor that an op needs."""

import pytest
import torch
from torch import Tensor

from mtpgraph import ops

from ..op_inputs import OPS, make_inputs


@pytest.mark.parametrize("name", OPS)
def test_none_for_a_tensor_is_a_type_error(name: str) -> None:
    op = getattr(ops, name)
    inputs = make_inputs(name)
    optional = {
        argument.name
        for argument in getattr(torch.ops.mtpgraph, name).default._schema.arguments
        if isinstance(argument.type, torch.OptionalType)
    }
    before = {k: v.clone() for k, v in inputs.items() if isinstance(v, Tensor)}
    for key in before.keys() - optional:
        with pytest.raises(TypeError, match=f"{key} must be a tensor, got None"):
            op(**{**inputs, key: None})
    for key, value in before.items():
        assert torch.equal(inputs[key], value)
