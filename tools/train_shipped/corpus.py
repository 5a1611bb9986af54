"""The text to learn from: the Python standard library's sources, split by subject, packed into one file.

``python -m tools.train_shipped.corpus --out build/shipped/corpus.xz`` packs this machine's; the training reads that
file on any machine. The sources are under the PSF licence (a few modules carry permissive notices of their own).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import platform
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

HELD_OUT_SHARE = 0.03
"""Of all bytes, about."""
_LARGEST_SUBJECT = 0.005
"""Share of all bytes that one held-out subject may have, so that several are held out."""
_LARGEST_FILE = 400_000
"""Bytes; larger files of the library are generated tables."""
_LEFT_OUT = re.compile(
    r"(^|/)(site-packages|dist-packages|__pycache__|lib2to3/tests/data)/"
    r"|^(encodings|pydoc_data)/"  # character tables, and the manual as string literals
    r"|^_sysconfigdata|^config-"  # what the build wrote
)
_SUBJECT_PREFIX = re.compile(r"^(test_|_test_|_py|_)+")
_COMMON = 5
"""A line in more files than this says nothing of where it comes from."""
_NEAR_COPY = 0.25
"""Share of a file's distinctive lines that another one may share with it."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the library."""

    path: str
    """Below the library's folder, with slashes."""
    content: bytes
    is_held_out: bool = False


@dataclass(frozen=True)
class Corpus:
    """The files in order, training ones and held-out ones."""

    files: tuple[SourceFile, ...]
    python: str
    """Version and implementation that the files belong to."""

    @cached_property
    def training(self) -> list[bytes]:
        """Contents to learn from."""
        return [file.content for file in self.files if not file.is_held_out]

    @cached_property
    def held_out(self) -> list[bytes]:
        """Contents to measure with."""
        return [file.content for file in self.files if file.is_held_out]

    @cached_property
    def sha256(self) -> str:
        """Of what :func:`pack` compresses; compressors of other versions may give other bytes."""
        return hashlib.sha256(_uncompressed(self)).hexdigest()


def collect(folder: Path) -> list[SourceFile]:
    """The ``.py`` files of a standard library, each content once, in the order of their paths."""
    found, seen = [], set()
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        name = path.relative_to(folder).as_posix()
        if _LEFT_OUT.search(name) or not path.is_file():
            continue
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if content and len(content) <= _LARGEST_FILE and digest not in seen and _is_text(content):
            seen.add(digest)
            found.append(SourceFile(name, content))
    return found


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:  # tests of other encodings
        return False
    return b"\0" not in content


def subject(path: str) -> str:
    """What a file is about: its package or module, tests together with what they test."""
    parts = [part for part in PurePosixPath(path).with_suffix("").parts if part not in ("test", "tests")]
    return _SUBJECT_PREFIX.sub("", parts[0]) if parts else "test"


def split(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Mark whole subjects as held out, in the order of their hashes, then drop training files that copy from them."""
    sizes: Counter[str] = Counter()
    for file in files:
        sizes[subject(file.path)] += len(file.content)
    total = sizes.total()
    held_out: set[str] = set()
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if sum(sizes[one] for one in held_out) >= HELD_OUT_SHARE * total:
            break
        if sizes[name] <= _LARGEST_SUBJECT * total:
            held_out.add(name)
    marked = [SourceFile(file.path, file.content, subject(file.path) in held_out) for file in files]
    copies = near_copies(marked)
    return [file for file in marked if file.path not in copies]


def near_copies(files: Iterable[SourceFile]) -> set[str]:
    """Paths of training files that share a good part of their distinctive lines with a held-out file."""
    lines = {file: _distinctive(file.content) for file in files}
    uses = Counter(line for of_file in lines.values() for line in of_file)
    lines = {file: {line for line in of_file if uses[line] <= _COMMON} for file, of_file in lines.items()}
    owners: defaultdict[bytes, list[SourceFile]] = defaultdict(list)
    for file, of_file in lines.items():
        for line in of_file if file.is_held_out else ():
            owners[line].append(file)
    return {file.path for file, of_file in lines.items() if not file.is_held_out and _copies(of_file, owners, lines)}


def _distinctive(content: bytes) -> set[bytes]:
    """Lines long enough to tell a file by."""
    return {line for raw in content.splitlines() if len(line := raw.strip()) >= 25}


def _copies(
    of_file: set[bytes], owners: Mapping[bytes, list[SourceFile]], lines: Mapping[SourceFile, set[bytes]]
) -> bool:
    shared = Counter(owner for line in of_file if line in owners for owner in owners[line])
    return any(count >= max(3, _NEAR_COPY * min(len(of_file), len(lines[owner]))) for owner, count in shared.items())


def library_corpus(folder: Path | None = None) -> Corpus:
    """The corpus of the Python that runs this, or of the library in ``folder``."""
    files = split(collect(folder or Path(sysconfig.get_path("stdlib"))))
    return Corpus(tuple(files), f"{platform.python_implementation()} {platform.python_version()}")


def _uncompressed(corpus: Corpus) -> bytes:
    """A line of JSON, then the contents."""
    listed = [[file.path, len(file.content), file.is_held_out] for file in corpus.files]
    header = json.dumps({"python": corpus.python, "files": listed}, separators=(",", ":"))
    return header.encode() + b"\n" + b"".join(file.content for file in corpus.files)


def pack(corpus: Corpus) -> bytes:
    """One compressed file that :func:`unpack` reads."""
    return lzma.compress(_uncompressed(corpus), preset=9 | lzma.PRESET_EXTREME)


def unpack(packed: bytes) -> Corpus:
    """Read what :func:`pack` wrote.

    Raises:
        ValueError: It is damaged, or something else.
    """
    try:
        line, body = lzma.decompress(packed).split(b"\n", 1)
        header = json.loads(line)
        sizes = [size for _, size, _ in header["files"]]
    except (lzma.LZMAError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is no packed corpus: {error}") from error
    if sum(sizes) != len(body):
        raise ValueError(f"the packed corpus lists {sum(sizes)} bytes and holds {len(body)}")
    files, start = [], 0
    for path, size, is_held_out in header["files"]:
        files.append(SourceFile(path, body[start : start + size], is_held_out))
        start += size
    return Corpus(tuple(files), header["python"])


def describe(corpus: Corpus) -> str:
    """One line: files, bytes, held-out part, version, digest."""
    training, held_out = (sum(map(len, part)) for part in (corpus.training, corpus.held_out))
    return (
        f"{corpus.python}: {len(corpus.training)} files, {training:,} bytes to learn from; "
        f"{len(corpus.held_out)} files, {held_out:,} bytes held out "
        f"({held_out / max(1, training + held_out):.1%}); sha256 of the content {corpus.sha256}"
    )


def main() -> None:
    """Pack this machine's corpus."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    corpus = library_corpus()
    packed = pack(corpus)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(packed)
    print(describe(corpus))
    print(f"{out}: {len(packed):,} bytes, sha256 {hashlib.sha256(packed).hexdigest()}")
    print("held out:", ", ".join(sorted({subject(file.path) for file in corpus.files if file.is_held_out})))


if __name__ == "__main__":
    main()
