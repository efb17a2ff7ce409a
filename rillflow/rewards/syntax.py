"""Syntax: parse Python source in a process whose ranks are threads.

CPython 3.11 counts the depth of all trees that a process builds in one counter. Threads that build trees at
the same time, which happens if a garbage collection runs Python code between them, fail with ``SystemError:
AST constructor recursion depth mismatch``. Standard library only.
"""

from __future__ import annotations

import ast
from threading import RLock

_TRIES = 10
_PARSING = RLock()


def parsed(source: str | bytes, filename: str = "<unknown>") -> ast.Module:
    """Return the syntax tree of a source text; one thread parses at a time.

    Args:
        source: the text, or bytes in the encoding that the file declares.
        filename: file name in errors.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: see ``ast.parse``.
    """
    with _PARSING:
        for _ in range(_TRIES - 1):
            try:
                return ast.parse(source, filename)
            except SystemError:  # other code, such as a library's, built a tree in another thread
                continue
        return ast.parse(source, filename)
