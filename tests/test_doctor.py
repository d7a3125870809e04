"""``mtpgraph doctor``: what it reports, and that its rules are those of the ops."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpgraph import doctor, ops
from mtpgraph.__main__ import main
from mtpgraph.ops import _register


def fake_cards(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """A CUDA build with these cards."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))

    def index(device: Any) -> int:
        return torch.device(device).index if not isinstance(device, int) else device

    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[index(device)]
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {index(device)}")


def fake_triton(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    find = doctor.importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        if name == "triton":
            return find("torch") if there else None
        # to look for a kernel is to look into a package that needs no Triton
        return find(name, package)

    monkeypatch.setattr(doctor.importlib.util, "find_spec", find_spec)


def test_doctor_prints_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["usable"]
    assert data["versions"]["torch"] == torch.__version__
    assert data["devices"][0]["device"] == "cpu"
    assert set(data["devices"][0]["ops"].values()) == {"reference"}
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}" in said
    assert said.endswith("usable\n")
    for problem in data["problems"]:
        assert problem["what"] in said
        assert problem["remedy"] in said


def test_doctor_lists_every_op() -> None:
    names = doctor.op_names()
    assert {"indexer_select", "selective_state_update_", "has_initial_state"} <= set(names)
    assert "reorder" not in names
    assert len(names) == sum(hasattr(torch.ops.mtpgraph, name) for name in ops.__all__)


@pytest.mark.parametrize("triton", [True, False])
def test_doctor_chooses_as_the_ops_do(monkeypatch: pytest.MonkeyPatch, triton: bool) -> None:
    fake_cards(monkeypatch, (7, 5), (8, 0), (9, 0))
    fake_triton(monkeypatch, triton)
    report = doctor.examine()
    assert [device["device"] for device in report["devices"]] == [
        "cpu", "cuda:0", "cuda:1", "cuda:2",
    ]  # fmt: skip
    for device in report["devices"][1:]:
        kernels = _register._has_kernels.__wrapped__(torch.device(device["device"]))
        assert set(device["ops"].values()) == {"triton" if kernels else "reference"}
    assert [device["fp8"] for device in report["devices"]] == [None, False, False, True]
    warned = "\n".join(problem["what"] for problem in report["problems"])
    assert "cuda:0 (card 0) has capability 7.5, and the kernels need 8.0" in warned
    assert ("no Triton" in warned) is not triton


def test_doctor_every_op_has_the_kernel_it_claims() -> None:
    """The file that is looked for is the one that the op imports."""
    kernels = Path(ops.__file__).parent.parent / "kernels"
    served = {name for name in doctor.op_names() if doctor._serves(name) == "triton"}
    there = {name for name in doctor.op_names() if (kernels / f"{name.rstrip('_')}.py").exists()}
    assert served == there
    assert served


def test_doctor_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpgraph.compile_passes._compat.cpp_compiler", lambda: None)
    report = doctor.examine()
    assert report["inductor"]["cpu"] is None
    (problem,) = [p for p in report["problems"] if "C++" in p["what"]]
    assert "CXX" in problem["remedy"]
    # the engine "eager" needs none
    assert report["usable"]


def test_doctor_finds_a_compiler_that_is_named_and_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mtpgraph.compile_passes._compat import cpp_compiler

    monkeypatch.setattr("shutil.which", lambda name: None)
    assert cpp_compiler() is None


def test_doctor_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file / "cache"))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert f"error: the cache of inductor cannot be written: {file}" in said
    assert "TORCHINDUCTOR_CACHE_DIR" in said
    assert said.endswith("not usable\n")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert doctor.examine()["usable"]
    # looking makes nothing
    assert not (tmp_path / "new").exists()


def test_doctor_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    report = doctor.examine()
    assert not report["usable"]
    assert any("2.10.1" in problem["what"] for problem in report["problems"])
