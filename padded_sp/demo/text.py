"""Real text for the demo: functions and paragraphs, each one sequence of bytes.

Without files of the user's own it is the source of Python's standard library on this machine.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

#: Token ids: the 256 bytes, then these; their number rounded up to a multiple of 16.
BEGIN, END, PAD = 256, 257, 258
VOCAB_SIZE = 272

_SHORTEST_BYTES, _LONGEST_BYTES = 24, 320
#: Of a sequence, with its begin and end.
MAX_TOKENS = _LONGEST_BYTES + 2

_FUNCTIONS_PER_FILE = 8


def token_packs(
    paths: Sequence[Path] | None, *, num_packs: int, tokens_per_pack: int, seed: int
) -> list[list[list[int]]]:
    """Packs of whole sequences of token ids, in an order that ``seed`` alone decides.

    Args:
        paths: files to take the text from; None: the standard library's.
        num_packs: how many packs; sequences come round again when the text is used up.
        tokens_per_pack: each pack has as many sequences as fit.

    Raises: ValueError: the files hold no text; a pack is too small for the longest sequence.
    """
    if tokens_per_pack < MAX_TOKENS:
        raise ValueError(
            f"a pack of {tokens_per_pack} tokens may not hold one sequence of {MAX_TOKENS}: use at "
            f"least {MAX_TOKENS} tokens per step"
        )
    # Twice the text that is needed: sequences differ in length, and few should come round again.
    wanted = 2 * num_packs * tokens_per_pack
    found = standard_library_functions(wanted, seed) if paths is None else split_files(paths)
    if not found:
        raise ValueError(f"no text to train on in {', '.join(map(str, paths or []))}")
    random.Random(seed).shuffle(found)
    endless = cycle([BEGIN, *text, END] for text in found)
    return list(islice(_packs(endless, tokens_per_pack), num_packs))


def standard_library_functions(num_bytes: int, seed: int) -> list[bytes]:
    """The first functions of the standard library's modules, ``num_bytes`` of them or all.

    The modules are taken in an order that ``seed`` decides, a few functions of each.
    """
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(seed).shuffle(modules)
    functions: list[bytes] = []
    for module in modules:
        functions += python_functions(module.read_bytes())[:_FUNCTIONS_PER_FILE]
        if sum(map(len, functions)) >= num_bytes:
            break
    return functions


def split_files(paths: Sequence[Path]) -> list[bytes]:
    """The functions of Python files and the paragraphs of all others, in order.

    Raises: ValueError: a path is no file.
    """
    pieces: list[bytes] = []
    for path in paths:
        if path.is_dir():
            raise ValueError(f"--text {path} is a directory; name the files in it")
        if not path.is_file():
            raise ValueError(f"--text {path}: there is no such file")
        split = python_functions if path.suffix == ".py" else paragraphs
        pieces += split(path.read_bytes())
    return pieces


def python_functions(source: bytes) -> list[bytes]:
    """The source of each function and method that is neither very short nor very long.

    Source that does not parse is split into paragraphs instead.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return paragraphs(source)
    lines = source.splitlines(keepends=True)
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    functions = (b"".join(lines[n.lineno - 1 : n.end_lineno]).strip() for n in nodes)
    return [f for f in functions if _SHORTEST_BYTES <= len(f) <= _LONGEST_BYTES]


def paragraphs(text: bytes) -> list[bytes]:
    """The paragraphs that blank lines divide; longer ones cut into sequences of legal length."""
    pieces: list[bytes] = []
    for paragraph in text.replace(b"\r\n", b"\n").split(b"\n\n"):
        stripped = paragraph.strip()
        starts = range(0, len(stripped), _LONGEST_BYTES)
        pieces += [stripped[start : start + _LONGEST_BYTES] for start in starts]
    return pieces


def _packs(sequences: Iterator[list[int]], tokens_per_pack: int) -> Iterator[list[list[int]]]:
    pack: list[list[int]] = []
    room = tokens_per_pack
    for sequence in sequences:
        if len(sequence) > room:
            yield pack
            pack, room = [], tokens_per_pack
        pack.append(sequence)
        room -= len(sequence)
