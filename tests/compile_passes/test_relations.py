"""Whether relations of sizes hold for every batch: judged exactly where that can be done."""

from typing import Any

import pytest
import sympy
from torch.utils._sympy import functions

from mtpgraph.compile_passes.relations import always, holds_for_samples

FloorDiv: Any = functions.FloorDiv
Mod: Any = functions.Mod
symbols: Any = sympy.symbols("T R", integer=True, positive=True)
T, R = symbols
END = {T: (2, 24), R: (2, 8)}
NO_END = {T: (2, None), R: (2, None)}

Eq: Any = sympy.Eq
Ne: Any = sympy.Ne
And: Any = sympy.And
Or: Any = sympy.Or

RELATIONS: dict[str, tuple[Any, bool | None, bool | None]] = {
    "more than one": (T > 1, True, True),
    "not one": (Ne(T, 1), True, True),
    "not a size in range": (Ne(T, 12), False, False),
    "not a size out of range": (Ne(T, 40), True, False),
    "no larger than the largest": (T <= 24, True, False),
    "not uniform": (Ne(T, 3 * R), False, False),
    "uniform": (Eq(T, 3 * R), False, False),
    "as many": (Eq(T - R, 2 * R), False, False),
    "never equal by parity": (Ne(2 * T, 4 * R + 1), True, True),
    "at most so many each": (T <= 3 * R, False, False),
    "a sum": (T + R > 3, True, True),
    "a product": (T * R > 3, True, True),
    "a product that may be less": (T * R > 5, None, None),
    "none of several": (And(Ne(T, 40), Ne(T, 48)), True, False),
    "one of several": (Or(Eq(T, 12), T < 2), None, None),
    "not one of several": (~(Eq(T, 40) | Eq(T, 48)), True, False),
    "no multiple": (Ne(Mod(T, 48), 0), True, None),
    "a multiple": (Eq(Mod(2 * T, 2), 0), True, True),
    "a rest": (Mod(T, 8) < 8, True, True),
    "half": (FloorDiv(T, 2) >= 1, True, True),
}


@pytest.mark.parametrize("name", RELATIONS)
def test_relations_in_a_range_and_without_end(name: str):
    relation, within, without = RELATIONS[name]
    assert always(relation, END) is within
    assert always(relation, NO_END) is without


def test_relations_hold_wherever_they_are_said_to():
    for relation, _, _ in RELATIONS.values():
        found = always(relation, END)
        values = {
            bool(relation.subs({T: tokens, R: requests}))
            for tokens in range(2, 25)
            for requests in range(2, 9)
        }
        if found is not None:
            assert found == (values == {True})


def test_samples_find_each_residue_of_two_sizes():
    assert not holds_for_samples(Ne(FloorDiv(T, R), 3), {})
    assert not holds_for_samples(Ne(T - 3 * R, 0), {})
    assert not holds_for_samples(T <= 5000, {})
    assert holds_for_samples(FloorDiv(T, 2) <= T, {})
