"""The keys that each row attends to: its topk largest logits, exactly."""

import torch
from torch import Tensor

from ._checks import check_device, check_dtype, check_rule, check_shape
from ._register import register


def indexer_topk(logits: Tensor, row_lens: Tensor, topk: int) -> Tensor:
    """Select the ``topk`` largest of the first ``row_lens`` logits of each row.

    The set is exact and the same on every device and in every run: equal logits (0.0 and -0.0
    are equal) go to the lower position, and NaN ranks as -inf. A key at -inf is still a key, so
    ``min(topk, row_len)`` positions always come back. DeepSeek-V3.2 selects 2048 keys this way.

    Args:
        logits: fp32 or bf16 [num_tokens, width], any strides; what lies past ``row_lens`` is not
            used
        row_lens: int32 [num_tokens], keys of each row; taken as within ``0 .. width``
        topk: positions per row, at least 1; may exceed ``width``

    Returns:
        int32 [num_tokens, topk], positions in ascending order, then -1

    Raises:
        TypeError: logits is neither fp32 nor bf16, or row_lens not int32
        ValueError: shapes or devices do not match, or topk is below 1
    """
    return _op(logits, row_lens, topk)


def check_topk(topk: int) -> None:
    check_rule(topk >= 1, "topk", "be at least 1", topk)


def _check(logits: Tensor, row_lens: Tensor, topk: int) -> None:
    check_dtype("logits", logits, torch.float32, torch.bfloat16)
    check_dtype("row_lens", row_lens, torch.int32)
    check_shape("logits", logits, num_tokens=None, width=None)
    check_shape("row_lens", row_lens, num_tokens=logits.shape[0])
    check_device("logits", logits.device, row_lens=row_lens)
    check_topk(topk)


def largest_positions(logits: Tensor, row_lens: Tensor, topk: int) -> Tensor:
    """The reference, which ``indexer_select`` shares."""
    num_tokens, width = logits.shape
    positions = torch.arange(width, dtype=torch.int32, device=logits.device)
    present = positions < row_lens.unsqueeze(1)
    if topk >= width:
        out = row_lens.new_full((num_tokens, topk), -1)
        out[:, :width] = torch.where(present, positions, -1)
        return out
    logits = logits.float().contiguous()
    # Adding 0.0 turns -0.0 into 0.0: some sorts tell them apart.
    ranked = torch.where(present & ~logits.isnan(), logits + 0.0, float("-inf"))
    # Absent keys lie behind all present ones, so a stable sort ranks them behind those at -inf.
    best = ranked.sort(dim=1, descending=True, stable=True).indices[:, :topk].to(torch.int32)
    best = torch.where(best < row_lens.unsqueeze(1), best, width).sort(dim=1).values
    return torch.where(best < width, best, -1)


def _fake(logits: Tensor, row_lens: Tensor, topk: int) -> Tensor:
    return row_lens.new_empty(logits.shape[0], topk)


_op = register(
    "indexer_topk(Tensor logits, Tensor row_lens, SymInt topk) -> Tensor",
    check=_check,
    reference=largest_positions,
    fake=_fake,
    rows={"logits": "token"},
    results=["topk_indices"],
)
