"""The example decoder: training forward against decode, and the loop around it."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mtpgraph.example import data, reference, train
from mtpgraph.example.cache import FreeList, make_caches
from mtpgraph.example.config import Config
from mtpgraph.example.decoder import Decoder
from mtpgraph.example.layers import AttentionCache, Caches, StateCache
from mtpgraph.example.model import Model, count_accepted, load, save
from mtpgraph.example.runs import Request, Result, Run, differences

BLOCK_SIZE = 16


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> Model:
    return load()


def int32(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def text(length: int, skip: int = 0) -> bytes:
    return b"".join(data.held_out_topics().values())[skip : skip + length]


class OneRequest:
    """Calls ``Model.step`` for one request over NaN-filled caches."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.caches = make_caches(model.config, 32, BLOCK_SIZE, 9)
        self.block_table = torch.randperm(32, dtype=torch.int32).view(1, -1)
        self.slots = int32([5, 2, 7, 0])

    def step(self, row: list[int], given: list[int], computed: int, accepted: int) -> list[Tensor]:
        positions = torch.arange(computed, computed + len(row))
        blocks = self.block_table[0, positions // BLOCK_SIZE].long()
        with torch.no_grad():
            return list(
                self.model.step(
                    torch.tensor(row),
                    torch.tensor(given),
                    int32(0, len(row)),
                    int32(computed + len(row)),
                    self.block_table,
                    blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
                    self.slots,
                    int32(accepted),
                    self.caches,
                )
            )


def test_weights_file_is_small() -> None:
    path = Path(train.WEIGHTS)
    assert path.stat().st_size < 8_000_000


@pytest.mark.parametrize(("length", "strays"), [(62, 0), (150, 5)], ids=["dense", "sparse"])
def test_step_equals_training_forward(model: Model, length: int, strays: int) -> None:
    """One token at a time. Beyond ``topk`` tokens, an index key on the edge between two fp8 codes
    can change which key is the last one chosen, hence a few strays."""
    tokens = torch.tensor(list(text(length + 4)))
    with torch.no_grad():
        logits, _ = train.forward(model, tokens[None, : length + 3], train.STAGES[-1])
    main, *drafts = (x[0] for x in logits)
    top = main.topk(2).values
    request = OneRequest(model)
    far = 0
    for t in range(length):
        said, accepted, drafted, gap = request.step(
            [int(tokens[t])], [int(tokens[t + 1])], computed=t, accepted=1
        )
        lead = float(top[t, 0] - top[t, 1])
        far += abs(float(gap) - lead) > 1e-4
        assert int(accepted) == 1
        if lead > 0.1:
            assert int(said) == int(main[t].argmax())
        # A later draft follows its own earlier ones: compare while those are the text.
        for d, said_in_training in enumerate(drafts):
            best = said_in_training[t].topk(2).values
            if best[0] - best[1] > 0.1:
                assert int(drafted[0, d]) == int(said_in_training[t].argmax())
            if t + d + 2 >= len(tokens) or int(drafted[0, d]) != int(tokens[t + d + 2]):
                break
    assert far <= strays


@pytest.mark.parametrize("length", [1, 5, 64, 100])
def test_chunked_forms_equal_the_recurrences(length: int) -> None:
    torch.manual_seed(0)
    model = Model(Config()).double()
    hidden = torch.randn(2, length, model.config.dim, dtype=torch.float64)
    for block, forward in zip(
        (model.blocks[0], model.blocks[2]), (reference.mamba, reference.delta), strict=True
    ):
        whole = forward(block.mixer, hidden)
        short = forward(block.mixer, hidden, 1)
        torch.testing.assert_close(whole, short, rtol=1e-9, atol=1e-9)


def test_rejected_tokens_leave_no_trace(model: Model) -> None:
    """A verify row with wrong drafts, then the right tokens: as if the drafts had never been."""
    tokens = list(text(24))
    clean, dirty = OneRequest(model), OneRequest(model)
    dirty.block_table = clean.block_table
    for request in (clean, dirty):
        request.step(tokens[:4], tokens[1:5], computed=0, accepted=1)
    expected, _, clean_drafts, _ = clean.step(tokens[4:5], [-1], computed=4, accepted=4)
    row = [tokens[4], (int(expected) + 1) % 256, 7, 9]
    said, accepted, drafts, _ = dirty.step(row, [-1] * 4, computed=4, accepted=4)
    assert int(said[0]) == int(expected)
    assert int(accepted) == 1
    # Drafted from the last accepted row, with the keys chosen there.
    assert torch.equal(drafts, clean_drafts)
    for at in range(5, 20):
        a = clean.step(tokens[at : at + 1], tokens[at + 1 : at + 2], computed=at, accepted=1)
        b = dirty.step(tokens[at : at + 1], tokens[at + 1 : at + 2], computed=at, accepted=1)
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-4)


def test_count_accepted_stops_at_the_first_wrong_draft() -> None:
    tokens = torch.tensor([5, 1, 2, 3, 5, 1, 9, 3, 6, 8])
    following = torch.tensor([1, 2, 3, 4, 1, 2, 3, 4, 7, 0])
    query_start_loc = int32(0, 4, 8, 9, 10, 10)
    assert count_accepted(tokens, following, query_start_loc, 3).tolist() == [4, 2, 1, 1, 1]


def test_padding_rows_change_nothing(model: Model) -> None:
    """Padding requests without tokens, padding tokens without request, garbage behind the table."""
    torch.manual_seed(0)
    outputs, caches = [], []
    for padding in (0, 3):
        request = OneRequest(model)
        request.block_table = torch.arange(32, dtype=torch.int32).view(1, -1)
        caches.append(request.caches)
        with torch.no_grad():
            outputs.append(
                model.step(
                    torch.tensor([72, 101, 108] + [0] * padding),
                    torch.tensor([101, 108, -1] + [-1] * padding),
                    int32(0, *[3] * (1 + padding)),
                    int32(3, *[0] * padding),
                    torch.cat([request.block_table, torch.full((padding, 32), -1).int()]),
                    torch.tensor([0, 1, 2] + [-1] * padding),
                    torch.cat([request.slots, torch.full((padding, 4), -1).int()]),
                    int32(1, *[1] * padding),
                    request.caches,
                )
            )
    (said, accepted, drafts, gaps), padded = outputs
    assert torch.equal(padded[0][:3], said)
    assert padded[1].tolist() == [*accepted.tolist(), 0, 0, 0]
    assert torch.equal(padded[2][:1], drafts)
    torch.testing.assert_close(padded[3][:3], gaps, rtol=1e-5, atol=1e-5)
    assert all(torch.isfinite(x.float()).all() for x in padded)
    for a, b in zip(*([*c.layers, c.mtp] for c in caches), strict=True):
        if isinstance(a, AttentionCache):
            # Codes may differ by a rounding.
            pairs = [(a.kv, b.kv), ((a.index_k != 0xFF).float(), (b.index_k != 0xFF))]
        else:
            pairs = list(zip(a, b, strict=True))
        for x, y in pairs:
            torch.testing.assert_close(x, y.float(), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_shared_drafts_write_their_index_keys(model: Model) -> None:
    """IndexShare saves the choice of keys, never the keys."""
    request = OneRequest(model)
    prompt = list(text(3))
    request.step(prompt, [*prompt[1:], -1], computed=0, accepted=1)
    cache = request.caches.mtp
    block = int(request.block_table[0, 0])
    dim = model.config.index_dim
    codes = cache.index_k[block, : BLOCK_SIZE * dim].view(BLOCK_SIZE, dim)
    written = (codes != 0xFF).any(1)
    assert written.tolist() == [True] * 5 + [False] * 11
    assert torch.isfinite(cache.kv[block, :5]).all()
    assert cache.kv[block, 5:].isnan().all()


PROMPTS = (1, 4, 5, 300, 2, 129)


def mixed_requests() -> list[Request]:
    return [
        Request(text(length, skip=997 * i + 40), 6 + 5 * (i % 3), arrival=i)
        for i, length in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def runs(model: Model) -> tuple[Decoder, Run, Run]:
    """Six requests through three places, so that slots and blocks are used again, dirty."""
    torch.set_num_threads(1)
    decoder = Decoder(model, max_reqs=3)
    speculative = decoder.decode_speculative(mixed_requests())
    return decoder, speculative, Decoder(model, max_reqs=3).decode_plain(mixed_requests())


def test_speculative_equals_plain(runs: tuple[Decoder, Run, Run]) -> None:
    _, speculative, plain = runs
    assert all(d.is_tie() for d in differences(plain, speculative))
    assert [len(r.tokens) for r in speculative.results] == [
        r.max_new_tokens for r in mixed_requests()
    ]
    assert speculative.steps < plain.steps
    assert speculative.mixed_steps > 0


def test_free_lists_are_full_again(runs: tuple[Decoder, Run, Run]) -> None:
    decoder, _, _ = runs
    assert len(decoder.blocks) == decoder.blocks.size
    assert len(decoder.slots) == decoder.slots.size


def test_dirty_caches_change_nothing(model: Model, runs: tuple[Decoder, Run, Run]) -> None:
    """The same requests again over what they left, in another order of places."""
    decoder, first, _ = runs
    poison(decoder.caches)
    again = decoder.decode_speculative(mixed_requests())
    assert all(d.is_tie() for d in differences(first, again))


def poison(caches: Caches) -> None:
    """NaN wherever a float is kept that belongs to nobody now."""
    for cache in caches.layers:
        if isinstance(cache, StateCache):
            cache.conv.fill_(torch.nan)
            cache.state.fill_(torch.inf)


def test_one_token_at_a_time_equals_prefill(model: Model) -> None:
    requests = [Request(text(70, skip=500), 8)]
    chunks = Decoder(model, max_reqs=1).decode_plain(requests)
    single = Decoder(model, max_reqs=1, chunk_size=1).decode_plain(requests)
    assert all(d.is_tie() for d in differences(single, chunks))
    assert single.steps == 70 + 8 - 1


def test_acceptance(model: Model) -> None:
    requests = [Request(text(150, skip=2000 * i), 40) for i in range(3)]
    run = Decoder(model, max_reqs=3).decode_speculative(requests)
    assert run.tokens_per_step > 1.8
    assert 0.0 < run.acceptance <= 1.0


def test_stop_byte_ends_a_request(model: Model, runs: tuple[Decoder, Run, Run]) -> None:
    _, run, _ = runs
    tokens = run.results[3].tokens
    stop = tokens[len(tokens) // 2]
    request = dataclasses.replace(mixed_requests()[3], stop=stop)
    stopped = Decoder(model, max_reqs=1).decode_speculative([request])
    assert stopped.results[0].tokens == tokens[: tokens.index(stop) + 1]


def test_differences_report_the_lead_of_the_oracle() -> None:
    oracle = Run([Result(b"", [1, 2, 3], [0.5, 2e-5, 1.0]), Result(b"", [1], [1.0])])
    other = Run([Result(b"", [1, 5, 3], [0.5, 0.0, 1.0]), Result(b"", [2], [1.0])])
    tie, real = differences(oracle, other)
    assert (tie.request, tie.position, tie.gap) == (0, 1, 2e-5)
    assert tie.is_tie()
    assert not real.is_tie()
    assert differences(oracle, oracle) == []


def test_free_list_refuses_what_it_does_not_have() -> None:
    free = FreeList(3)
    taken = free.take(2)
    with pytest.raises(RuntimeError, match="2 taken where 1 are free"):
        free.take(2)
    free.give_back(taken)
    assert sorted(free.take(3)) == [0, 1, 2]


def test_decoder_refuses_what_does_not_fit(model: Model) -> None:
    decoder = Decoder(model, max_reqs=1, max_seq_len=32)
    with pytest.raises(ValueError, match="max_seq_len=32"):
        decoder.decode_plain([Request(b"x" * 30, 3)])
    with pytest.raises(ValueError, match="at least one"):
        decoder.decode_plain([Request(b"", 3)])


def test_save_and_load(tmp_path: Path) -> None:
    config = Config(dim=32, mlp_dim=32, layers=("delta",), mamba_heads=1)
    model = Model(config)
    save(model, tmp_path / "weights.safetensors")
    again = load(tmp_path / "weights.safetensors")
    assert again.config == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert not any(p.requires_grad for p in again.parameters())


def test_held_out_topics_are_not_in_the_training_text() -> None:
    held = data.held_out_topics()
    assert 5 <= len(held) < 20
    known = set(data.training_text().split(b"\n\n"))
    assert not any(p in known for topic in held.values() for p in topic.split(b"\n\n") if p)


def test_held_out_requests_are_reproducible() -> None:
    requests = data.held_out_requests(20, 48, seed=3)
    assert requests == data.held_out_requests(20, 48, seed=3)
    assert [len(r.prompt) for r in requests[:4]] == [1, 4, 5, 300]
    assert all(24 <= r.max_new_tokens <= 48 for r in requests)
