"""Train the example decoder: ``python -m mtpgraph.example.train``.

Three stages on one cosine schedule. First the main model and one draft step with dense attention;
then all draft steps and the indexer, which learns from the dense attention on longer windows; at
last everything with the keys that the indexer chooses, as in decode.
"""

import argparse
import dataclasses
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from . import reference
from .attention import AttentionLayer
from .config import Config
from .data import held_out_requests, held_out_topics, training_text
from .decoder import Decoder
from .layers import MambaLayer
from .model import WEIGHTS, Model, load, save


@dataclasses.dataclass(frozen=True)
class Stage:
    """How the steps up to ``until`` (a fraction of all) are trained."""

    until: float
    batch_size: int
    length: int
    num_drafts: int
    indexer: bool
    sparse: bool


STAGES = (
    Stage(0.55, batch_size=8, length=256, num_drafts=1, indexer=False, sparse=False),
    Stage(0.7, batch_size=4, length=512, num_drafts=3, indexer=True, sparse=False),
    Stage(1.0, batch_size=4, length=512, num_drafts=3, indexer=True, sparse=True),
)
DRAFT_WEIGHT = 0.3
INDEX_WEIGHT = 0.3


def forward(
    model: Model, tokens: Tensor, stage: Stage, dropout: float = 0.0
) -> tuple[list[Tensor], Tensor]:
    """Logits of the main model and of every draft step, and the summed loss of the indexers.

    tokens: int64 [batch, length + num_drafts]; logits ``d`` at position t predict token t + 1 + d.
    """
    length = tokens.shape[1] - stage.num_drafts
    embedded = model.embed(tokens)
    hidden = F.dropout(embedded[:, :length], dropout)
    index_loss = hidden.new_zeros(())
    for block in model.blocks:
        mixer = block.mixer
        if isinstance(mixer, AttentionLayer):
            out, _, _, loss = reference.attention(mixer, hidden, stage.sparse, stage.indexer)
            index_loss = index_loss + loss
        elif isinstance(mixer, MambaLayer):
            out = reference.mamba(mixer, hidden)
        else:
            out = reference.delta(mixer, hidden)
        hidden = hidden + F.dropout(out, dropout)
        hidden = hidden + F.dropout(block.mlp(hidden), dropout)
    logits = [model.head(model.out_norm(hidden))]
    mtp = model.mtp
    keys: list[Tensor] = []
    mask = hidden.new_zeros(())
    for step in range(stage.num_drafts):
        hidden = mtp.join(hidden, embedded[:, step + 1 : step + 1 + length])
        if step == 0:
            out, key, mask, loss = reference.attention(
                mtp.mixer, hidden, stage.sparse, stage.indexer
            )
            index_loss = index_loss + loss
        else:
            out, key = reference.attention_shared(mtp.mixer, hidden, step, keys, mask)
        keys.append(key)
        hidden = hidden + F.dropout(out, dropout)
        hidden = hidden + F.dropout(mtp.mlp(hidden), dropout)
        logits.append(model.head(mtp.out_norm(hidden)))
    return logits, index_loss


def loss_of(model: Model, tokens: Tensor, stage: Stage, dropout: float) -> tuple[Tensor, Tensor]:
    """The training loss, and the main model's cross entropy alone.

    A draft step learns the text, and the main model's own distribution: what a draft must hit is
    what the main model will say.
    """
    logits, index_loss = forward(model, tokens[:, :-1], stage, dropout)
    length = logits[0].shape[1]
    main = F.cross_entropy(logits[0].flatten(0, 1), tokens[:, 1 : length + 1].flatten())
    loss = main + INDEX_WEIGHT * index_loss
    teacher = logits[0].detach().softmax(-1)
    for d in range(1, stage.num_drafts + 1):
        text = F.cross_entropy(logits[d].flatten(0, 1), tokens[:, 1 + d : length + 1 + d].flatten())
        own = F.cross_entropy(logits[d][:, :-d].flatten(0, 1), teacher[:, d:].flatten(0, 1))
        loss = loss + DRAFT_WEIGHT * 0.5 * (text + own)
    return loss, main.detach()


@torch.no_grad()
def evaluate(model: Model, stage: Stage = STAGES[-1]) -> tuple[float, float]:
    """Held-out bits per byte, and the tokens per step that greedy drafts would give along the
    held-out text itself (decoding follows the model's own text, which is easier to guess)."""
    text = torch.frombuffer(bytearray(b"".join(held_out_topics().values())), dtype=torch.uint8)
    width = stage.length + 4
    rows = text[: len(text) // width * width].long().view(-1, width)
    bits, tokens, kept, places = 0.0, 0, 0, 0
    model.eval()
    for batch in rows.split(stage.batch_size):
        logits, _ = forward(model, batch[:, :-1], stage)
        target = batch[:, 1 : stage.length + 1]
        bits += F.cross_entropy(logits[0].flatten(0, 1), target.flatten(), reduction="sum").item()
        tokens += target.numel()
        said = [x.argmax(-1) for x in logits]
        end = stage.length - stage.num_drafts
        run = torch.ones_like(said[0][:, :end], dtype=torch.bool)
        for d in range(1, stage.num_drafts + 1):
            run = run & (said[d][:, :end] == said[0][:, d : end + d])
            kept += int(run.sum())
        places += run.numel()
    model.train()
    return bits / tokens / math.log(2), 1 + kept / places


def optimizers(model: Model, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest."""
    matrices, rest = [], []
    for name, p in model.named_parameters():
        plain = p.dim() == 2 and not name.startswith(("embed", "head")) and "conv" not in name
        (matrices if plain else rest).append(p)
    return [
        torch.optim.Muon(
            matrices, lr=lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: Model, args: argparse.Namespace) -> None:
    text = torch.frombuffer(bytearray(training_text()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(args.seed)
    optims = optimizers(model, args.lr)
    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    started = time.perf_counter()
    average = 0.0
    with Progress(*columns, refresh_per_second=1) as progress:
        task = progress.add_task("training", total=args.steps)
        for step in range(args.steps):
            stage = next(s for s in STAGES if step < s.until * args.steps)
            rate = schedule(step, args.steps)
            for optim in optims:
                optim.param_groups[0]["lr"] = args.lr * rate
            width = stage.length + stage.num_drafts + 1
            starts = torch.randint(len(text) - width, (stage.batch_size, 1), generator=generator)
            tokens = text[starts + torch.arange(width)].long()
            loss, main = loss_of(model, tokens, stage, args.dropout)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optim in optims:
                optim.step()
                optim.zero_grad(set_to_none=True)
            average += (main.item() - average) * (0.02 if step else 1.0)
            progress.update(task, advance=1, description=f"{average / math.log(2):.3f} bits")
            if (step + 1) % args.report == 0 or step + 1 == args.steps:
                save(model, args.out)
                bits, per_step = evaluate(model)
                progress.console.print(
                    f"step {step + 1}  train {average / math.log(2):.3f}  held-out {bits:.3f} bits "
                    f"per byte  {per_step:.2f} tokens per step  "
                    f"{time.perf_counter() - started:.0f} s"
                )


def schedule(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine from 1 to 0.03."""
    if step < 50:
        return (step + 1) / 50
    return 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * (step - 50) / (steps - 50)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report", type=int, default=200, help="steps between evaluations")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = Model(Config())
    train(model, args)
    run = Decoder(load(args.out)).decode_speculative(held_out_requests(8, 48, args.seed))
    print(f"decoding: {run.tokens_per_step:.2f} tokens per step, {run.acceptance:.0%} accepted")


if __name__ == "__main__":
    main()
