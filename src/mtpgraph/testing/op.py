"""A custom op must be what its schema and its fake say."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from ..compile_passes import _compat
from ._common import counted, fail
from .record import Problem
from .state import difference, differs, far, storage_bytes, tolerance

_Args = tuple[list[Any], dict[str, Any]]

_OPCHECK = {
    "test_schema": (
        "its schema does not say what it writes or aliases",
        "mark every argument that it writes in the schema, Tensor(a!) x or mutates_args=['x'], and "
        "return fresh tensors",
    ),
    "test_autograd_registration": (
        "its gradient is not registered as an op's",
        "use torch.library.register_autograd, or refuse inputs that require grad",
    ),
    "test_faketensor": (
        "its fake does not do what it does",
        "let the fake return torch.empty of the shape, dtype, device and strides that the op gives",
    ),
    "test_aot_dispatch_dynamic": (
        "it fails or differs when it is traced with symbolic shapes",
        "compute shapes in the fake from the shapes of the inputs alone, and read no values there",
    ),
}


def assert_op(op: Any, *args: Any, **kwargs: Any) -> None:
    """A custom op keeps the contract that compilers count on.

    ``torch.library.opcheck`` holds, and besides: it writes exactly what its schema declares, its
    outputs share no memory with its inputs, no output holds memory that was never written, fake
    outputs have the shapes, dtypes and strides of real ones, an empty batch that the fake accepts
    runs, and inputs with gaps between their elements give the same result or are refused. The op
    runs on copies.

    Args:
        op: ``torch.ops.namespace.name``, an overload of it, what ``torch.library.custom_op``
            returned, or a function of ``mtpgraph.ops``
        *args, **kwargs: one valid call. Inputs of several sizes, of size 1 too, are worth a call
            of ``assert_op`` each

    Raises:
        AssertionError: lists every rule that the op breaks, with the place where it was written
        TypeError: ``op`` is no op, or has several overloads
    """
    __tracebackhide__ = True
    overload = _overload(op)
    call = _Call(overload, list(args), kwargs)
    problems = call.check()
    if problems:
        name = overload.name().removesuffix(".default")
        fail(f"{name} breaks {counted(len(problems), 'rule')} of ops", problems)


def _overload(op: Any) -> OpOverload:
    op = getattr(op, "_opoverload", op)
    if str(getattr(op, "__module__", "")).startswith("mtpgraph.ops."):
        op = getattr(torch.ops.mtpgraph, op.__name__, op)
    if isinstance(op, OpOverloadPacket):
        names = op.overloads()
        if len(names) != 1:
            raise TypeError(f"op must be one overload, got {op} with {', '.join(names)}")
        op = getattr(op, names[0])
    if not isinstance(op, OpOverload):
        raise TypeError(f"op must be an op of torch.ops or a custom_op, got {op!r}")
    return op


class _Call:
    def __init__(self, op: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.args, self.kwargs = args, kwargs
        arguments = op._schema.arguments
        self.names = [argument.name for argument in arguments]
        self.written = {
            a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write
        }
        self.aliases = {
            name
            for returned in op._schema.returns
            if returned.alias_info is not None
            for name in self.written
        }
        self.problems: list[Problem] = []

    def check(self) -> list[Problem]:
        with warnings.catch_warnings():
            # what an op warns of is not what is asked here
            warnings.simplefilter("ignore")
            plain = self._memory()
            # what opcheck finds of the same kind says less
            told = {"test_schema"} if self.problems else set()
            self._written_outputs(plain)
            before = len(self.problems)
            self._fake(plain)
            told |= {"test_faketensor"} if len(self.problems) > before else set()
            self._opcheck(told)
            self._empty()
            self._gaps(plain)
        return self.problems

    def _say(self, reason: str, remedy: str) -> None:
        place = _compat.place_of_op(self.op)
        self.problems.append(Problem.at("op", place, reason, remedy))

    def _copy(self) -> _Args:
        return _compat.tree_map(_copied, (self.args, self.kwargs))

    def _run(self, given: _Args) -> list[Tensor]:
        """Tensors that the op returns; random numbers are the same in every run."""
        with _compat.seeded():
            outputs = self.op(*given[0], **given[1])
        return [leaf for leaf in _compat.tree_leaves(outputs) if isinstance(leaf, Tensor)]

    def _named(self, given: _Args) -> dict[str, Tensor]:
        """Tensors of the arguments by name, those in lists too."""
        found: dict[str, Tensor] = {}
        named = [*zip(self.names, given[0], strict=False), *given[1].items()]
        for name, value in named:
            if isinstance(value, Tensor):
                found[name] = value
            elif isinstance(value, list | tuple):
                items = ((f"{name}[{i}]", item) for i, item in enumerate(value))
                found |= {key: item for key, item in items if isinstance(item, Tensor)}
        return found

    def _opcheck(self, told: set[str]) -> None:
        tests = list(_OPCHECK)
        tensors = self._named((self.args, self.kwargs)).values()
        if any(t.is_floating_point() and t.itemsize == 1 for t in tensors):
            # it compares with allclose, which fp8 does not have; our own checks cover the rest
            tests.remove("test_schema")
        args, kwargs = self._copy()
        results = torch.library.opcheck(
            self.op, tuple(args), kwargs, test_utils=tests, raise_exception=False
        )
        for test, result in results.items():
            if result == "SUCCESS" or test in told:
                continue
            what, remedy = _OPCHECK[test]
            detail = " ".join(str(result).split())
            if not _compat.has_fake(self.op) or "no fake impl" in detail:
                name = self.op._schema.name
                what = "it has no fake, so it cannot be traced"
                remedy = f'register its shapes: @torch.library.register_fake("{name}")'
            if remedy not in [problem.remedy for problem in self.problems]:
                self._say(f"{what} ({test}: {detail[:300]})", remedy)

    def _memory(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Run once; outputs are fresh, and nothing is written that is not declared."""
        given = self._copy()
        named = self._named(given)
        before = {name: storage_bytes(tensor).clone() for name, tensor in named.items()}
        values = {name: tensor.clone() for name, tensor in named.items()}
        outputs = self._run(given)
        for name, tensor in named.items():
            argument = name.partition("[")[0]
            now = storage_bytes(tensor)
            changed = now.shape != before[name].shape or not torch.equal(now, before[name])
            if argument not in self.written and changed:
                self._say(
                    f"it writes {name}, which its schema does not declare: "
                    f"{_change(name, values[name], tensor)}",
                    f"declare it, Tensor(a!) {argument} or mutates_args=[{argument!r}], or write "
                    "to a copy",
                )
        for number, output in enumerate(outputs):
            for name, tensor in named.items():
                declared = name.partition("[")[0] in self.aliases
                shared = _compat.storage_key(output) == _compat.storage_key(tensor)
                if shared and output.numel() and not declared:
                    self._say(
                        f"output {number} shares the memory of {name}: compilers count on outputs "
                        "that are fresh",
                        f"return {name}.clone(), or nothing where the op writes in place",
                    )
        for first in range(len(outputs)):
            for second in range(first + 1, len(outputs)):
                a, b = outputs[first], outputs[second]
                if a.numel() and b.numel() and _compat.storage_key(a) == _compat.storage_key(b):
                    self._say(
                        f"outputs {first} and {second} share memory",
                        "return a tensor of its own for each output",
                    )
        return [output.clone() for output in outputs], {
            name: tensor.clone() for name, tensor in named.items()
        }

    def _written_outputs(self, plain: tuple[list[Tensor], dict[str, Tensor]]) -> None:
        """Nothing in the result is memory that the op never wrote."""
        given = self._copy()
        with _compat.filled_memory():
            outputs = self._run(given)
        self._same(
            plain,
            (outputs, self._named(given)),
            ("ordinarily", "when fresh memory holds NaN"),
            "{name} holds memory that was never written",
            "write every entry of an output, those of padding and empty rows too, or allocate it "
            "with torch.zeros",
        )

    def _same(
        self,
        plain: tuple[list[Tensor], dict[str, Tensor]],
        other: tuple[list[Tensor], dict[str, Tensor]],
        words: tuple[str, str],
        reason: str,
        remedy: str,
    ) -> None:
        pairs = [
            (f"output {i}", a, b) for i, (a, b) in enumerate(zip(plain[0], other[0], strict=True))
        ]
        pairs += [(name, plain[1][name], other[1][name]) for name in plain[1]]
        for name, a, b in pairs:
            if a.shape != b.shape or a.dtype != b.dtype:
                self._say(
                    f"{reason.format(name=name)}: {_kind(a)} {words[0]}, {_kind(b)} {words[1]}",
                    remedy,
                )
                return
            where = far(a, b, *tolerance(a.dtype, None, None))
            if bool(where.any()):
                self._say(
                    f"{reason.format(name=name)}: {difference(name, a, b, where, words)}", remedy
                )
                return

    def _fake(self, plain: tuple[list[Tensor], dict[str, Tensor]]) -> None:
        fakes = self._faked((self.args, self.kwargs))
        if fakes is None:
            return
        if len(fakes) != len(plain[0]):
            self._say(
                f"its fake returns {counted(len(fakes), 'tensor')}, the op {len(plain[0])}",
                "return from the fake one tensor for each that the op returns",
            )
            return
        for number, (fake, real) in enumerate(zip(fakes, plain[0], strict=True)):
            self._like(number, fake, real)

    def _like(self, number: int, fake: Any, real: Tensor) -> None:
        pairs = list(zip(fake.shape, real.shape, strict=False))
        same = fake.dim() == real.dim() and all(
            int(a) == b for a, b in pairs if _compat.is_known(a)
        )
        told, were = [], []
        if not same:
            told.append(f"shape {list(map(str, fake.shape))}".replace("'", ""))
            were.append(f"{list(real.shape)}")
        if fake.dtype != real.dtype:
            told.append(f"dtype {fake.dtype}")
            were.append(f"{real.dtype}")
        if fake.device != real.device:
            told.append(f"device {fake.device}")
            were.append(f"{real.device}")
        known = all(_compat.is_known(size) for size in fake.stride())
        if same and known and not _same_strides(fake, real):
            told.append(f"strides {list(map(int, fake.stride()))}")
            were.append(f"{list(real.stride())}")
        if told:
            self._say(
                f"the fake of output {number} has {' and '.join(told)}, the op gives "
                f"{' and '.join(were)}",
                "let the fake return torch.empty of the shape, dtype, device and strides that the "
                "op gives",
            )

    def _faked(self, given: _Args) -> list[Any] | None:
        """Fake outputs; None where the fake refuses, or there is none."""
        if not _compat.has_fake(self.op):
            return None
        mode = _compat.fake_mode()
        args, kwargs = _compat.tree_map(
            lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, given
        )
        try:
            with mode:
                outputs = self.op(*args, **kwargs)
        except Exception:
            # opcheck has said so of the real inputs
            return None
        return [leaf for leaf in _compat.tree_leaves(outputs) if isinstance(leaf, Tensor)]

    def _empty(self) -> None:
        """A batch of no rows, where the fake accepts it."""
        tensors = [t for n, t in self._named((self.args, self.kwargs)).items() if t.dim()]
        batch = next((t.shape[0] for t in tensors), 0)
        kept = {
            id(t) for n, t in self._named((self.args, self.kwargs)).items() if n in self.written
        }

        def cut(leaf: Any) -> Any:
            rows = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch
            return leaf[:0] if rows and id(leaf) not in kept else leaf

        if not batch:
            return
        given = _compat.tree_map(_copied, _compat.tree_map(cut, (self.args, self.kwargs)))
        fakes = self._faked(given)
        if fakes is None:
            return
        try:
            outputs = self._run(given)
        except Exception as error:
            self._say(
                f"its fake accepts a batch of no rows, the op fails: {_first_line(error)}",
                "return an empty tensor of the right shape before the launch where there are no "
                "rows, or refuse it in the fake too",
            )
            return
        for number, (fake, real) in enumerate(zip(fakes, outputs, strict=False)):
            shape = [int(n) for n in fake.shape if _compat.is_known(n)]
            if len(shape) == fake.dim() and shape != list(real.shape):
                self._say(
                    f"output {number} of a batch of no rows has shape {list(real.shape)}, that of "
                    f"the fake {shape}",
                    "give an empty batch the shapes that the fake gives it",
                )

    def _gaps(self, plain: tuple[list[Tensor], dict[str, Tensor]]) -> None:
        """Each tensor in turn with gaps between its elements: the same result, or refused."""
        for name, tensor in self._named((self.args, self.kwargs)).items():
            if tensor.dim() == 0 or tensor.numel() < 2:
                continue
            given = self._with_gaps(name)
            try:
                outputs = self._run(given)
            except (ValueError, TypeError, RuntimeError, NotImplementedError):
                continue
            self._same(
                plain,
                (outputs, self._named(given)),
                ("contiguous", f"with gaps between the elements of {name}"),
                "{name} depends on the memory layout of " + name,
                "use the strides of the tensor, or refuse it with ValueError where it is not "
                "contiguous",
            )

    def _with_gaps(self, wanted: str) -> _Args:
        args, kwargs = self._copy()
        named = self._named((args, kwargs))
        gapped = with_gaps(named[wanted])
        target = named[wanted]
        return _compat.tree_map(lambda leaf: gapped if leaf is target else leaf, (args, kwargs))


def with_gaps(tensor: Tensor) -> Tensor:
    """The same values with unused elements in between, which hold something else."""
    held = torch.stack([tensor, torch.ones_like(tensor)], dim=-1)
    return held[..., 0]


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if any(
        stride == 0 and size > 1 for stride, size in zip(leaf.stride(), leaf.shape, strict=True)
    ):
        # an expanded tensor cannot be written as it lies
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    copied = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    copied.copy_(leaf.detach())
    return copied.requires_grad_(leaf.requires_grad)


def _same_strides(fake: Any, real: Tensor) -> bool:
    """Equal strides where they matter: in dimensions of more than one entry."""
    if real.numel() == 0:
        return True
    pairs = zip(fake.stride(), real.stride(), real.shape, strict=True)
    return all(int(a) == b for a, b, size in pairs if size > 1)


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _change(name: str, before: Tensor, after: Tensor) -> str:
    if before.shape != after.shape:
        return f"{list(before.shape)} became {list(after.shape)}"
    where = differs(before, after)
    if not bool(where.any()):
        return "bytes between its rows"
    return difference(name, before, after, where, ("before", "after"))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
