"""The example decoder: its modules, its weights file and its speculative decode step."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mtpgraph import ops

from .attention import AttentionLayer
from .config import Config
from .layers import AttentionCache, Caches, DeltaLayer, MambaLayer, Mlp, Rows, States

WEIGHTS = Path(__file__).with_name("weights.safetensors")
_KINDS = {"mamba": MambaLayer, "attention": AttentionLayer, "delta": DeltaLayer}


class Block(nn.Module):
    def __init__(self, kind: str, config: Config) -> None:
        super().__init__()
        self.mixer = _KINDS[kind](config)
        self.mlp = Mlp(config)


class Mtp(nn.Module):
    """One draft step, applied again and again: (hidden of t, token t + 1) -> hidden for t + 2."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.token_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.proj = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.mixer = AttentionLayer(config)
        self.mlp = Mlp(config)
        self.out_norm = nn.RMSNorm(config.dim, eps=1e-6)

    def join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return self.proj(torch.cat([self.hidden_norm(hidden), self.token_norm(embedded)], dim=-1))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        # Any: the type of a ModuleList does not say what it holds.
        self.blocks: Any = nn.ModuleList(Block(kind, config) for kind in config.layers)
        self.out_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.mtp = Mtp(config)

    def step(
        self,
        tokens: Tensor,
        next_tokens: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        state_indices: Tensor,
        num_accepted_tokens: Tensor,
        caches: Caches,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decode the rows of a batch, decide which drafts stand, and draft again.

        Args:
            tokens: int64 [num_tokens]; a verify row is the last accepted token and its drafts, a
                prompt row is a piece of the prompt
            next_tokens: int64 [num_tokens], the token that follows where the prompt says it, even
                if it is not in this step; -1 where the model decides
            query_start_loc, seq_lens, block_table, slot_mapping: the batch contract of the ops
            state_indices: int32 [num_reqs, next_n], a slot per token; or [num_reqs] for a prefill,
                whose rows may be of any length
            num_accepted_tokens: int32 [num_reqs], what the previous step returned, 1 for a new
                request; not read with a 1-D ``state_indices``
            caches: updated in place

        Returns:
            said: int64 [num_tokens], the most likely next token after each token
            accepted: int32 [num_reqs], tokens of each row that stand; 0 for a padding request
            drafts: int64 [num_reqs, num_drafts], guesses for the tokens behind the one said last
            gaps: float32 [num_tokens], logit of ``said`` minus the second largest
        """
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, tokens.shape[0])
        rows = Rows(query_start_loc, seq_lens, block_table, slot_mapping, row_lens)
        one_slot = state_indices.dim() == 1
        states = States(
            query_start_loc,
            state_indices,
            state_indices if one_slot else state_indices[:, 0],
            None if one_slot else num_accepted_tokens,
            ops.has_initial_state(query_start_loc, seq_lens),
        )
        hidden, said, gaps = self.run(tokens, rows, states, caches)
        # A draft that stands is what the model says, so this is right for verify rows as well.
        following = torch.where(next_tokens >= 0, next_tokens, said)
        if one_slot:
            accepted = query_start_loc[1:] - query_start_loc[:-1]
        else:
            accepted = count_accepted(tokens, following, query_start_loc, self.config.num_drafts)
        accepted = torch.where(seq_lens > 0, accepted, 0)
        drafts = self.draft(hidden, following, accepted, rows, caches.mtp)
        return said, accepted, drafts, gaps

    def plain_step(
        self,
        tokens: Tensor,
        next_tokens: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        state_indices: Tensor,
        num_accepted_tokens: Tensor,
        caches: Caches,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``step`` without drafts: every token is given, and all of them stand."""
        row_lens, _ = ops.flatten_decode(query_start_loc, seq_lens, tokens.shape[0])
        rows = Rows(query_start_loc, seq_lens, block_table, slot_mapping, row_lens)
        new = ops.has_initial_state(query_start_loc, seq_lens)
        slots = state_indices if state_indices.dim() == 1 else state_indices[:, 0]
        states = States(query_start_loc, slots, slots, None, new)
        _, said, gaps = self.run(tokens, rows, states, caches)
        accepted = query_start_loc[1:] - query_start_loc[:-1]
        return said, accepted, said.new_empty(seq_lens.shape[0], 0), gaps

    def run(
        self, tokens: Tensor, rows: Rows, states: States, caches: Caches
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The main model: last hidden states, the most likely next tokens, their lead."""
        hidden = self.embed(tokens)
        for block, cache in zip(self.blocks, caches.layers, strict=True):
            if isinstance(block.mixer, AttentionLayer):
                out, _ = block.mixer.decode(hidden, cache, rows)
            else:
                out = block.mixer.decode(hidden, cache, states)
            hidden = hidden + out
            hidden = hidden + block.mlp(hidden)
        top = self.head(self.out_norm(hidden)).topk(2, dim=-1)
        return hidden, top.indices[:, 0], top.values[:, 0] - top.values[:, 1]

    def draft(
        self,
        hidden: Tensor,
        following: Tensor,
        accepted: Tensor,
        rows: Rows,
        cache: AttentionCache,
    ) -> Tensor:
        """Run the MTP module over all rows, then from the last accepted row of each request on.

        The first pass fills the module's cache at the positions of this step. What it writes behind
        the last accepted row is wrong, and so is in time what the drafts write at the positions
        behind it: nobody looks before the next step, whose first pass starts right there, has
        written all positions that it may look at.

        IndexShare: the passes after the first attend to the keys chosen at the last accepted row,
        and to the positions drafted since. They write their index keys nevertheless.
        """
        mtp = self.mtp
        hidden = mtp.join(hidden, self.embed(following))
        out, topk_indices = mtp.mixer.decode(hidden, cache, rows)
        last = (rows.query_start_loc[:-1] + accepted - 1).clamp(min=0)
        hidden = hidden[last] + out[last]
        hidden = hidden + mtp.mlp(hidden)
        topk_indices = topk_indices[last]
        tokens = self.head(mtp.out_norm(hidden)).argmax(-1)
        drafts = [tokens]

        num_reqs = rows.seq_lens.shape[0]
        requests = torch.arange(num_reqs, dtype=torch.int32, device=tokens.device)
        requests = torch.where(rows.seq_lens > 0, requests, -1)
        starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=tokens.device)
        query_lens = rows.query_start_loc[1:] - rows.query_start_loc[:-1]
        for ahead in range(self.config.num_drafts - 1):
            lens = rows.seq_lens - query_lens + accepted + ahead + 1
            lens = torch.where(rows.seq_lens > 0, lens, 0)
            position = (lens - 1).unsqueeze(1)
            slots = ops.topk_to_slots(position, rows.block_table, requests, cache.kv.shape[1])
            draft_rows = Rows(starts, lens, rows.block_table, slots[:, 0].long(), lens)
            topk_indices = torch.cat([topk_indices, position], dim=1)
            hidden = mtp.join(hidden, self.embed(tokens))
            hidden = hidden + mtp.mixer.decode_shared(hidden, cache, topk_indices, draft_rows)
            hidden = hidden + mtp.mlp(hidden)
            tokens = self.head(mtp.out_norm(hidden)).argmax(-1)
            drafts.append(tokens)
        return torch.stack(drafts, dim=1)


def count_accepted(
    tokens: Tensor, following: Tensor, query_start_loc: Tensor, num_drafts: int
) -> Tensor:
    """Tokens of each row up to the first that is not what should follow the one before it."""
    ahead = torch.arange(1, num_drafts + 1, dtype=torch.int32, device=tokens.device)
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    index = query_start_loc[:-1].unsqueeze(1) + ahead
    inside = ahead < query_lens.unsqueeze(1)
    index = torch.where(inside, index, 0)
    stands = inside & (tokens[index] == following[(index - 1).clamp(min=0)])
    return 1 + stands.int().cumprod(1).sum(1, dtype=torch.int32)


def save(model: Model, path: Path = WEIGHTS) -> None:
    """Write the weights with the configuration in the header."""
    from safetensors.torch import save_file

    tensors = {name: p.detach().contiguous() for name, p in model.state_dict().items()}
    save_file(tensors, path, {"config": json.dumps(dataclasses.asdict(model.config))})


def load(path: Path = WEIGHTS) -> Model:
    """Read a weights file; the model is ready to decode."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        fields = json.loads(file.metadata()["config"])
        fields["layers"] = tuple(fields["layers"])
        model = Model(Config(**fields))
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return model.requires_grad_(False).eval()
