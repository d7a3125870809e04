"""The text: the language reference that ships with Python as ``pydoc_data.topics``."""

import random

from .runs import Request

_HELD_OUT_EVERY = 10

# Around the edges of a decode row (4 tokens), of a block (16), of a prefill chunk (128); and more.
PROMPT_LENS = (1, 4, 5, 300, 2, 3, 61, 16, 8, 33, 128, 6, 132, 24, 17, 200)


def _topics() -> dict[str, str]:
    # Some distributions of Python leave it out; the package must import without it.
    from pydoc_data.topics import topics

    return topics


def training_text() -> bytes:
    """Every topic but the held-out ones, sorted by name, without the paragraphs that the held-out
    topics share with them."""
    held = held_out_topics()
    known = {p.strip() for text in held.values() for p in text.decode().split("\n\n")}
    parts = []
    for name, text in sorted(_topics().items()):
        if name not in held:
            paragraphs = [p for p in text.split("\n\n") if p.strip() not in known]
            parts.append("\n\n".join(paragraphs))
    return "".join(parts).encode()


def held_out_topics() -> dict[str, bytes]:
    """Every tenth topic by name.

    The shipped weights never saw their text, in the Python they were trained with; another
    Python's topics may differ by a few.
    """
    topics = _topics()
    return {name: topics[name].encode() for name in sorted(topics)[::_HELD_OUT_EVERY]}


def held_out_requests(count: int, max_new_tokens: int, seed: int) -> list[Request]:
    """Requests with prompts from the held-out topics; one and later two arrive at each step.

    The lengths of the prompts run through ``PROMPT_LENS``; how many tokens are asked for differs
    from request to request, up to ``max_new_tokens``.
    """
    chance = random.Random(seed)
    texts = sorted(held_out_topics().values())
    requests = []
    arrival = 0
    for i in range(count):
        length = PROMPT_LENS[i % len(PROMPT_LENS)]
        text = chance.choice([text for text in texts if len(text) > length] or texts)
        # A prompt starts where a word does.
        starts = [at + 1 for at in range(len(text) - length) if text[at : at + 1].isspace()]
        start = chance.choice(starts or [0])
        new = chance.randint((max_new_tokens + 1) // 2, max_new_tokens)
        requests.append(Request(text[start : start + length], new, arrival))
        # First one a step, then faster than requests finish, so that the batch grows.
        arrival += 1 if i < count // 3 else i % 2
    return requests
