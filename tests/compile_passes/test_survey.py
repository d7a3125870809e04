from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mtpgraph.compile_passes.survey import Survey, Surveyor


class Pair(NamedTuple):
    a: Tensor
    b: Any


class Plain:
    def __init__(self, tensor: Tensor, scale: float) -> None:
        self.tensor = tensor
        self.scale = scale


def test_survey_finds_tensors_in_order():
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    survey = Survey([Pair(a, {"x": b}), Plain(c, 2.0), a])
    assert all(map(lambda x, y: x is y, survey.tensors, [a, b, c, a]))


def test_survey_structure_tells_constants_and_nesting_apart():
    t = torch.zeros(1)
    values: list[Any] = [
        [t, 1],
        [t, 1.0],
        [t, True],
        [t, 0.0],
        [t, -0.0],
        [t, None],
        [t, "1"],
        (t, 1),
        [1, t],
        [[t], 1],
        [t],
        [],
        {},
        {"a": t},
        {"b": t},
        Pair(t, 1),
        Plain(t, 1.0),
        Plain(t, 2.0),
    ]
    assert len({Survey(value).structure for value in values}) == len(values)
    assert Survey([torch.ones(3), 1]).structure == Survey([t, 1]).structure


def test_survey_of_what_contains_itself_ends():
    value: list[Any] = [torch.zeros(1)]
    value.append(value)
    assert len(Survey(value).tensors) == 1


def test_survey_refuses_what_it_cannot_hash():
    with pytest.raises(TypeError, match="arguments must hold tensors, containers and objects that"):
        Survey([bytearray(b"x")])
    with pytest.raises(TypeError, match=r"got an array of numpy: pass torch\.from_numpy"):
        Survey({"mask": torch.ones(2).numpy()})


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value["list"].append(torch.zeros(1)),
        lambda value: value["list"].__setitem__(0, torch.zeros(1)),
        lambda value: value["list"][1].update(new=1),
        lambda value: value.pop("plain"),
        lambda value: setattr(value["plain"], "tensor", torch.zeros(1)),
        lambda value: setattr(value["plain"], "scale", 3.0),
        lambda value: value["list"][0].set_(torch.zeros(1)),
        lambda value: value["module"].train(False),
        lambda value: setattr(value["module"], "weight", torch.nn.Parameter(torch.zeros(1))),
    ],
)
def test_survey_notices_a_change(change: Any):
    value = {
        "list": [torch.ones(1), {"x": torch.ones(1)}],
        "plain": Plain(torch.ones(1), 2.0),
        "module": torch.nn.Linear(1, 1),
    }
    survey = Survey(value)
    assert survey.holds(value)
    change(value)
    assert not survey.holds(value)


def test_surveyor_looks_again_at_what_changed_alone():
    surveyor, value = Surveyor(), [torch.zeros(1)]
    first = surveyor.look("caches", value)
    value[0].add_(1)
    assert surveyor.look("caches", value) is first
    value.append(torch.zeros(1))
    second = surveyor.look("caches", value)
    assert second is not first
    assert len(second.tensors) == 2
    assert surveyor.look("caches", [*value]).structure == second.structure
