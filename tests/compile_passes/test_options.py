import pytest

import mtpgraph
from mtpgraph import Options


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"siezs": [1]}, ValueError, "unknown option 'siezs'; did you mean 'sizes'"),
        ({"zzz": 1}, ValueError, "unknown option 'zzz'; known: sizes, next_n"),
        ({"sizes": [0, 1]}, ValueError, r"sizes must be positive, got 0 in \(0, 1\)"),
        ({"sizes": [-4]}, ValueError, "sizes must be positive, got -4"),
        ({"sizes": [4, 2]}, ValueError, r"sizes must increase, got \(4, 2\)"),
        ({"sizes": [2, 2]}, ValueError, r"sizes must increase, got \(2, 2\)"),
        ({"sizes": []}, ValueError, "sizes must hold at least one size"),
        ({"sizes": [1.0]}, TypeError, "sizes must hold ints, got 1.0"),
        ({"sizes": [True]}, TypeError, "sizes must hold ints, got True"),
        ({"sizes": 8}, TypeError, "sizes must be a sequence of ints, got 8"),
        ({"sizes": [2], "specialize": [1]}, ValueError, r"specialize must be a subset of sizes"),
        ({"next_n": 0}, ValueError, "next_n must be a positive int, got 0"),
        (
            {"engine": "aot_eager"},
            ValueError,
            "engine must be one of inductor, eager, tensorrt, got",
        ),
        ({"cudagraph": "partial"}, ValueError, "cudagraph must be one of full, off"),
        ({"disable_passes": ["fuse_selekt"]}, ValueError, "did you mean 'fuse_select'"),
        ({"disable_passes": "fuse_select"}, TypeError, "disable_passes must be a sequence"),
        ({"strict": 1}, TypeError, "strict must be a bool, got 1"),
    ],
)
def test_options_refuse(given: dict, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        Options.parse(given)
    with pytest.raises(error, match=match):
        mtpgraph.compile(lambda x: x, inputs={"x": mtpgraph.Batched()}, **given)


def test_options_default_sizes():
    sizes = Options().sizes
    assert sizes[:5] == (1, 2, 4, 8, 16)
    assert sizes[-1] == 512
    assert all(size % 8 == 0 for size in sizes[3:])
