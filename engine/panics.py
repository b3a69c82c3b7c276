"""Panics of the tokenizers library: a damaged tokenizer.json, or one that means harm, can make any call end in one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


class TokenizerPanicError(ValueError):
    """The library gave up in a way that Python takes for no Exception; the message is its own, in one line."""


@contextmanager
def panics_as_errors() -> Generator[None]:
    """Raise TokenizerPanicError in place of a panic inside, which would pass by every handler and end the thread."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # made by pyo3 at run time: there is no module to import it from
            raise
        raise TokenizerPanicError(" ".join(str(error).split())) from error
