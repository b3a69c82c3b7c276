"""The sandbox of chat templates: transformers' own, in which no single operation makes a text or a list without bounds.

Rendering is stopped between operations (see `chat_limits`). What one operation could make of a few characters is
worked out here before it begins: products, sums, joins, paddings, replacements, formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any, cast

from jinja2 import nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .chat_limits import TemplateLimitError

MOST_CHARS = 16 << 20  # of one text: as many as a whole chat may have
MOST_ITEMS = 1 << 20  # of one list
MOST_BITS = 1 << 12  # of one number
MOST_DECIMALS = 100
# Filters for web pages, whose patterns may take the square of a long text's length.
_NOT_OF_CHATS = ("urlize", "striptags", "wordwrap", "xmlattr")
_PADDINGS = ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "truncate", "to_bytes")
_CHECKED = {"replace", "format", "round", "sum", "tojson", *_PADDINGS}
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{7})")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{7})")


class _Generator(CodeGenerator):
    """Makes the code of templates, in which `~` is an operation of the sandbox as `+` is."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802  as jinja2 calls it
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name, of which some look at what they are given first, also those that are put there later."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _checked(name, function) if name in _CHECKED else function)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox that refuses, by TemplateLimitError, operations whose result would be too large."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "+", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        filters = _Filters()
        for name, function in self.filters.items():
            if name not in _NOT_OF_CHATS:
                filters[name] = function
        filters["join"] = _join
        self.filters = filters

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See jinja2."""
        if operator == "*":
            _check_product(left, right)
        elif operator == "+" and _is_sequence(left) and _is_sequence(right):
            _check_size(left, len(left) + len(right))
        elif operator == "%" and isinstance(left, str | bytes):
            _check_format(left, _WIDE_PERCENT)
        return super().call_binop(context, operator, left, right)

    def joined(self, parts: Iterable[object], between: str = "") -> str:
        """The parts as one text."""
        texts = [str(part) for part in parts]
        _check_size("", sum(map(len, texts)) + len(between) * len(texts))
        return between.join(texts)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """See jinja2."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str | bytes | int):
            if function.__name__ == "join" and args:
                args = (list(args[0]),)  # of what may be a generator
                _check_size(owner, sum(map(len, args[0])) + len(cast("str", owner)) * len(args[0]))
            _check_call(function.__name__, owner, (*args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """See jinja2."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__.replace("{{", "").replace("}}", ""), _WIDE_BRACES)
        return wrapped


def bound_templates() -> None:
    """Have transformers make the environments of chat templates of this class. Does no harm when repeated."""
    from transformers.utils import chat_template_utils

    made: Any = chat_template_utils
    if not hasattr(made, "ImmutableSandboxedEnvironment"):  # no template is to run without bounds
        raise RuntimeError("this version of transformers makes its sandbox elsewhere: use one of constraints/")
    made.ImmutableSandboxedEnvironment = BoundedEnvironment


@pass_environment
def _join(environment: BoundedEnvironment, value: Any, d: Any = "", attribute: Any = None) -> str:
    """The filter `join`."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return environment.joined(value, str(d))


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at its arguments first."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_call(name, args[first], (*args[first + 1 :], *kwargs.values()))
        return function(*args, **kwargs)

    return update_wrapper(checked, function)  # and with it what jinja2 has noted of the function


def _check_call(name: str, value: Any, args: tuple[Any, ...]) -> None:
    """Raise TemplateLimitError where a method or filter would make too much of `value`."""
    numbers = [each if isinstance(each, int) else len(each) for each in args if isinstance(each, int | str)]
    most = max(numbers, default=0)
    if name == "translate":
        raise TemplateLimitError("calls translate, which can make a text of any length")
    if name == "sum" and not all(isinstance(each, int | float | str | None) for each in args):
        raise TemplateLimitError("sums up what are no numbers, which can take any time")
    if name == "format":
        _check_format(value, _WIDE_PERCENT)
    elif name in ("round", "tojson") and most > MOST_DECIMALS:
        raise TemplateLimitError(f"gives {name} a number above {MOST_DECIMALS}")
    elif name == "replace" and len(args) > 1:
        _check_size("", len(str(value)) + str(value).count(str(args[0])) * len(str(args[1])))
    elif name in ("indent", "expandtabs"):
        text = str(value)
        _check_size("", len(text) + most * (text.count("\t") if name == "expandtabs" else 1 + len(text.splitlines())))
    elif name in _PADDINGS:
        _check_size([] if name in ("batch", "slice") else "", most)


def _check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if _is_sequence(value) and isinstance(times, int):
            _check_size(value, len(value) * times)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MOST_BITS:
        raise TemplateLimitError(f"makes a number of more than {MOST_BITS} bits")


def _check_format(text: Any, pattern: re.Pattern[str]) -> None:
    if pattern.search(text.decode("latin-1") if isinstance(text, bytes) else str(text)):
        raise TemplateLimitError("formats to a width of millions, or one that is not written there")


def _check_size(kind: object, size: int) -> None:
    """Raise TemplateLimitError for a value of a kind and size that no chat needs."""
    most, what = (MOST_ITEMS, "items") if isinstance(kind, list | tuple) else (MOST_CHARS, "characters")
    if size > most:
        raise TemplateLimitError(f"makes {size if size < 1 << 64 else 'countless'} {what} at once; {most} are allowed")


def _is_sequence(value: object) -> bool:
    return isinstance(value, str | bytes | list | tuple)
