"""Known graph breaks and recompiles of tests, in a JSON file under version control."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Key = tuple[str, ...]
"""What it is, file, code and kind of a problem: without its line, which moves."""

_FIELDS = ("what", "file", "code", "kind")
_VERSION = 1

T = TypeVar("T")


class Baseline:
    """Breaks and recompiles that each test is known to have."""

    def __init__(self, path: Path, tests: Mapping[str, list[Key]]) -> None:
        self.path = path
        self._tests = dict(tests)

    @classmethod
    def read(cls, path: Path, *, new: bool) -> Baseline:
        """The file; empty if it is to be made anew.

        Raises:
            ValueError: there is no such file, or it is no baseline
        """
        if not path.exists():
            if new:
                return cls(path, {})
            raise ValueError(f"there is no {path}; write it with --mtpgraph-update-baseline")
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            if held["version"] != _VERSION:
                raise ValueError(f"{path} has version {held['version']!r}, expected {_VERSION}")
            tests = {
                test: [tuple(str(entry[field]) for field in _FIELDS) for entry in entries]
                for test, entries in held["tests"].items()
            }
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no baseline of mtpgraph: {error!r}") from error
        return cls(path, tests)

    def unknown(self, test: str, what: str, keys: Sequence[Key], items: Sequence[T]) -> list[T]:
        """The items whose key the test is not known for; an entry covers one item."""
        left = Counter(key for key in self._tests.get(test, ()) if key[0] == what)
        unknown = []
        for key, item in zip(keys, items, strict=True):
            if left[key]:
                left[key] -= 1
            else:
                unknown.append(item)
        return unknown

    def stale(self, ran: Mapping[str, list[Key]], root: Path) -> list[str]:
        """Entries that did not occur in a test that ran, or whose test file is gone."""
        told = []
        for test, keys in sorted(self._tests.items()):
            if test in ran:
                gone = Counter(keys) - Counter(ran[test])
                told += [f"{test}: {_words(key)}" for key in gone.elements()]
            elif not (root / test.partition("::")[0]).exists():
                told += [f"{test}: {_words(key)} (its file is gone)" for key in keys]
        return told

    def write(self, ran: Mapping[str, list[Key]], root: Path) -> None:
        """Replace what is known of the tests that ran; drop tests whose file is gone."""
        tests = {
            test: keys
            for test, keys in (self._tests | dict(ran)).items()
            if keys and (root / test.partition("::")[0]).exists()
        }
        held = {
            "version": _VERSION,
            "tests": {
                test: [dict(zip(_FIELDS, key, strict=True)) for key in sorted(keys)]
                for test, keys in sorted(tests.items())
            },
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(held, indent=2) + "\n", encoding="utf-8")


def keys_of(what: str, problems: Iterable[Mapping[str, Any]], root: Path) -> list[Key]:
    """How a baseline knows problems."""
    return [(what, relative(p["file"], root), p["code"], p["kind"]) for p in problems]


def relative(file: str, root: Path) -> str:
    """A path as seen from the root of the tests, where it lies below it."""
    path = Path(file)
    return path.relative_to(root).as_posix() if file and path.is_relative_to(root) else file


def _words(key: Key) -> str:
    what, file, code, kind = key
    return f"{what} in {file}: `{code}` ({kind})"
