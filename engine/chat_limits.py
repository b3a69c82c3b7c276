"""Bounds of what a chat template may take: it comes with the model, and a model may come from anybody.

Rendering is watched by a trace function of its own thread: at each call of a Python function, and at each line of the
template, it looks at the clock, and now and then at the memory of the process. A single operation of the interpreter
(a text times a number) runs to its end unseen, so powers are refused before a template runs, and what would make
much at once is refused by the sandbox (see `chat_sandbox`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

RENDER_LIMIT_S = 5.0
RENDER_LIMIT_BYTES = 1 << 30  # of growth of the whole process: far above what a rendered chat needs
RENDER_LIMIT_CHARS = 64 << 20  # written by the template's own lines
LARGEST_NUMBER = 10_000_000  # in a template's text; 16 MB are the most that it may render
_EVENTS_PER_LOOK = 16  # at the memory, which takes some microseconds; each may take 64 MiB more
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TEMPLATE_FILE = "<template>"  # as jinja2 names the code of templates that came as text


class TemplateLimitError(Exception):
    """The template was stopped; the message completes "the chat template …"."""


def refuse_large_operations(template: str) -> None:
    """Raise TemplateLimitError for powers and for integers above LARGEST_NUMBER; jinja2's errors for bad syntax."""
    from jinja2 import Environment

    # The environment only reads the syntax; nothing is rendered with it.
    for _, kind, text in Environment().lex(template):  # noqa: S701
        if kind == "operator" and text == "**":
            raise TemplateLimitError("raises to a power (**), which can take any time")
        if kind == "integer" and len(text) > len("0x") and int(text.replace("_", ""), 0) > LARGEST_NUMBER:
            raise TemplateLimitError(f"holds an integer above {LARGEST_NUMBER}, with which texts become any length")


@contextmanager
def render_limits(limit_s: float = RENDER_LIMIT_S, limit_bytes: int = RENDER_LIMIT_BYTES) -> Generator[None]:
    """Raise TemplateLimitError out of what runs inside, once it has taken too long or too much memory."""
    before = sys.gettrace()
    sys.settrace(_Watch(time.monotonic() + limit_s, limit_s, limit_bytes).called)
    try:
        yield
    except MemoryError as error:
        raise TemplateLimitError("needs more memory than there is") from error
    finally:
        sys.settrace(before)


class _Watch:
    """The trace functions of one rendering."""

    def __init__(self, deadline_s: float, limit_s: float, limit_bytes: int) -> None:
        self._deadline_s = deadline_s
        self._limit_s = limit_s
        self._limit_bytes = limit_bytes
        self._most_bytes: int | None = None  # set at the first look: short renderings have none
        self._events = 0
        self._chars = 0

    def called(self, frame: FrameType, event: str, argument: Any) -> Any:
        """A function of Python begins: watch its lines if it is the template's."""
        self._look(frame, event, argument)
        return self._look if frame.f_code.co_filename == _TEMPLATE_FILE else None

    def _look(self, frame: FrameType, event: str, argument: Any) -> Any:
        del frame
        if event == "return" and isinstance(argument, str):  # a generator's yield is such an event too
            self._chars += len(argument)
            if self._chars > RENDER_LIMIT_CHARS:
                raise TemplateLimitError(f"was stopped after it wrote {RENDER_LIMIT_CHARS} characters")
        if time.monotonic() > self._deadline_s:
            raise TemplateLimitError(f"was stopped after {self._limit_s:g} s")
        self._events += 1
        if self._events % _EVENTS_PER_LOOK == 0:
            resident = _resident_bytes()
            if self._most_bytes is None:
                self._most_bytes = resident + self._limit_bytes
            elif resident > self._most_bytes:
                raise TemplateLimitError(f"was stopped after it took {self._limit_bytes >> 20} MiB of memory")
        return self._look


def _resident_bytes() -> int:
    """Memory of this process in use; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except OSError:
        return 0
