"""The fenced blocks of a Markdown page, and what each of them is for a test.

A page is followed from top to bottom, in a folder of its own that looks like a checkout. ``bash`` blocks are run, each
in a shell that stops at the first command that fails. ``python`` blocks are run as scripts; with ``title="train.py"``
they are saved under that name for the commands after them, and so are ``yaml`` and ``json`` blocks. A ``diff`` block
with a title changes that file: lines that begin with ``+`` and ``-``, others as they stand in the file, places apart
from each other divided by ``@@``. A ``text`` block is what the block before it prints on standard output: line by line,
a line ``...`` standing for any lines and ``...`` inside a line for any text. An HTML comment on the line above a fence
says more: ``<!-- numbers vary -->`` compares the output with every number masked, ``<!-- numbers and order vary -->``
in any order of lines too, ``<!-- dry-run -->`` marks commands that need machines or accounts that are not there, which
are checked without being started. Any other block is an error, so that nothing on a page goes unexecuted by accident.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

DRY_RUN, NUMBERS_VARY, NUMBERS_AND_ORDER_VARY = "dry-run", "numbers vary", "numbers and order vary"
#: Which comments a language may have above it.
_MARKS = {
    "bash": {DRY_RUN},
    "python": set(),
    "text": {NUMBERS_VARY, NUMBERS_AND_ORDER_VARY},
    "diff": set(),
    "yaml": set(),
    "json": set(),
}
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>.*)$")
_COMMENT = re.compile(r"^ *<!-- *(?P<mark>.*?) *-->$")
_TITLE = re.compile(r'\btitle="(?P<title>[^"]+)"')
_NUMBER = re.compile(r"(?<![\w.])[-+±]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


#: Any lines, or any text in a line.
_ANY = "..."


class BlockError(AssertionError):
    """A block that cannot be followed, or does not say what happens."""


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    #: A file's name; empty: none.
    title: str
    #: What the comment above the fence says; empty: nothing.
    mark: str
    text: str
    #: Of the fence, counted from 1.
    line: int

    @property
    def is_run(self) -> bool:
        return self.language == "bash" or (self.language == "python" and not self.title)

    @property
    def is_saved(self) -> bool:
        return self.language in ("python", "yaml", "json") and bool(self.title)


def read_blocks(page: str) -> list[Block]:
    """The blocks of a page, each of a kind that is known and in a place where it makes sense."""
    blocks = list(_blocks(page.splitlines()))
    for index, block in enumerate(blocks):
        _check(block, blocks[:index], blocks[index + 1 :])
    return blocks


def _blocks(lines: list[str]) -> Iterator[Block]:
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        number += 1
        if opening is None:
            continue
        first, closing = number, re.compile(rf"^ *{opening['ticks']}`*~*\s*$")
        while number < len(lines) and not closing.match(lines[number]):
            number += 1
        if number == len(lines):
            raise BlockError(f"line {first}: the block is never closed")
        indent = len(opening["indent"])
        text = "".join(f"{line[min(indent, len(line) - len(line.lstrip())) :]}\n" for line in lines[first:number])
        language, _, options = opening["info"].strip().partition(" ")
        title = _TITLE.search(options)
        comment = _COMMENT.match(lines[first - 2]) if first >= 2 else None
        yield Block(language, title["title"] if title else "", comment["mark"] if comment else "", text, first)
        number += 1


def _check(block: Block, before: list[Block], after: list[Block]) -> None:
    def refuse(what: str) -> None:
        raise BlockError(f"line {block.line}: {what}")

    if block.language not in _MARKS:
        refuse(f"a block of {block.language or 'no language'} is not executed by anything; use {', '.join(_MARKS)}")
    if block.mark and block.mark not in _MARKS[block.language]:
        known = ", ".join(sorted(_MARKS[block.language])) or "none"
        refuse(f"<!-- {block.mark} --> above a block of {block.language} means nothing; known: {known}")
    if block.language in ("diff", "yaml", "json") and not block.title:
        refuse(f'a block of {block.language} needs title="FILE"')
    if block.is_saved and not any(block.title.removesuffix(".py") in later.text for later in after if later.is_run):
        refuse(f"{block.title} is saved, but nothing after it runs it")
    if block.language == "diff" and not any(block.title == earlier.title and earlier.is_saved for earlier in before):
        refuse(f"{block.title} has not been saved before it is changed")
    if block.language == "text" and not (before and before[-1].is_run and before[-1].mark != DRY_RUN):
        refuse("no command stands before this output")


def patched(text: str, diff: str) -> str:
    """``text`` with the changes of a ``diff`` block."""
    for change in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = change.splitlines(keepends=True)
        old = "".join(line[1:] or "\n" for line in lines if not line.startswith("+"))
        new = "".join(line[1:] or "\n" for line in lines if not line.startswith("-"))
        if text.count(old) != 1:
            raise BlockError(f"the diff fits in {text.count(old)} places instead of one:\n{change}")
        text = text.replace(old, new)
    return text


def difference(shown: str, printed: str, mark: str = "") -> str:
    """How the output that a page shows differs from what was printed; empty: it does not."""
    wanted, found = ([_plain(line, bool(mark)) for line in text.strip("\n").split("\n")] for text in (shown, printed))
    if mark == NUMBERS_AND_ORDER_VARY:
        wanted, found = sorted(wanted), sorted(found)
        if _ANY in wanted:
            wanted = [line for line in wanted if line != _ANY]
            found = [line for line in found if line in wanted]
    lines = ("(?:.*\n)*" if line == _ANY else re.escape(line).replace(re.escape(_ANY), ".*") + "\n" for line in wanted)
    if re.fullmatch("".join(lines), "".join(f"{line}\n" for line in found)):
        return ""
    return "\n".join(difflib.unified_diff(wanted, found, "shown", "printed", lineterm="", n=100))


def _plain(line: str, is_masked: bool) -> str:
    """Without what may vary: numbers, and with them the width of columns."""
    if not is_masked:
        return line.rstrip()
    line = re.sub(r"-{3,}", "---", line)
    return " ".join(_NUMBER.sub("<number>", line).split())
