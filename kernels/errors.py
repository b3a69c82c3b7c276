"""Errors of the kernels.

KernelError
├── BackendError   no such backend, or not on this device; the message names the choices
└── BuildError     the C++ sources could not be compiled, stored or loaded on this machine
"""

from __future__ import annotations


class KernelError(Exception):
    """An operation cannot be computed in the way that was asked for."""


class BackendError(KernelError, ValueError):
    """The backend asked for cannot be used; `choices` are those that can be named."""

    def __init__(self, message: str, choices: tuple[str, ...]) -> None:
        super().__init__(message)
        self.choices = choices


class BuildError(KernelError):
    """The compiled CPU kernels cannot be had here; `output` is what the compiler said, if it ran."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output
