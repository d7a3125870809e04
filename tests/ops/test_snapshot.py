import pytest
import torch
from torch import Tensor

from mtpgraph.ops.snapshot import snapshot


def strided() -> dict[str, Tensor]:
    """Inputs by what is special about them."""
    return {
        "contiguous": torch.randn(3, 4),
        "transposed": torch.randn(3, 4).t(),
        "slice": torch.randn(3, 8)[:, 2:6],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "number": torch.randn(()),
        "empty": torch.randn(0, 4),
        "bool": torch.tensor([True, False]),
        "int32": torch.arange(5, dtype=torch.int32),
        "bfloat16": torch.randn(3).bfloat16(),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }


@pytest.mark.parametrize("name", list(strided()))
def test_snapshot_is_a_clone(name: str, device: str):
    x = strided()[name].to(device)
    copy = snapshot(x)
    torch.testing.assert_close(copy, x, rtol=0, atol=0)
    assert copy.stride() == x.clone().stride()
    assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not x.numel()


@pytest.mark.parametrize("name", list(strided()))
def test_snapshot_passes_opcheck(name: str, device: str):
    torch.library.opcheck(torch.ops.mtpgraph.snapshot.default, (strided()[name].to(device),))


def test_snapshot_has_the_gradient_of_a_copy():
    """A pass may put it into a graph that is trained."""
    x = torch.randn(3, requires_grad=True)
    (snapshot(x * 2) * torch.arange(3)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.tensor([0.0, 2.0, 4.0]))


def test_snapshot_keeps_what_inductor_would_overwrite():
    def step(lens: Tensor, prev: Tensor) -> None:
        old = snapshot(lens)
        lens.add_(1)
        prev.copy_(old)

    lens, prev = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    torch.compile(step, fullgraph=True)(lens, prev)
    assert prev.tolist() == [0, 1, 2, 3]
    assert lens.tolist() == [1, 2, 3, 4]
