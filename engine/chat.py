"""Chats to ids by the model's own template, with everything that came from the caller as plain text.

Where no text of the caller could play a part in a control token, the ids are those of transformers'
`apply_chat_template(…, tokenize=True)`. Otherwise the chat is rendered in a disguise (see `chat_guard`) and tokenised
by a private copy of the tokenizer whose normalizer takes the disguise off.

Templates run in transformers' sandbox (jinja2's ImmutableSandboxedEnvironment), within bounds of time and memory (see
`chat_limits` and `chat_sandbox`). They are the model's, not the caller's: a caller cannot pass one, nor any other
parameter of `apply_chat_template`, nor redefine `bos_token` and the like.
"""

from __future__ import annotations

import inspect
import itertools
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from .chat_guard import CallerText, ChatGuard, caller_texts, is_control
from .chat_limits import TemplateLimitError, refuse_large_operations, render_limits
from .chat_sandbox import bound_templates
from .panics import panics_as_errors
from .types import RequestRefusedError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding, Tokenizer

MAX_NESTING = 64
MAX_RENDERED_CHARS = 16 * 2**20
MAX_SAID_CHARS = 1000  # of what a template says when it refuses a chat


class ChatTemplateError(RequestRefusedError):
    """A chat that the template cannot make a prompt of: code `invalid_request`, or `unsupported` without a template."""

    def __init__(self, message: str, code: str = "invalid_request", param: str = "messages") -> None:
        super().__init__(code, message, param)


class ChatEncoder:
    """Renders and tokenises chats for one tokenizer. May be used by several threads at once."""

    def __init__(self, pretrained: Any, raw: Tokenizer) -> None:
        """`pretrained`: a tokenizer of transformers (for its template); `raw`: its backend, without truncation."""
        bound_templates()
        self._pretrained = pretrained
        self._raw = raw
        self._added: dict[int, AddedToken] = raw.get_added_tokens_decoder()
        self._variables = frozenset(cast("Mapping[str, str]", pretrained.special_tokens_map))
        taken = frozenset(inspect.signature(pretrained.apply_chat_template).parameters) | {"messages", "self"}
        self._reserved = taken - {"documents", "add_generation_prompt"} | self._variables
        self._sides: dict[str, _TemplateSide] = {}  # by template; at most one per template of the model
        self._lock = threading.Lock()  # around the making of a side

    def encode(
        self,
        messages: list[dict[str, object]],
        tools: list[object] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Ids of a chat, ready for the assistant's turn. Raises RequestRefusedError, mostly a ChatTemplateError."""
        variables = {"add_generation_prompt": True, **(template_kwargs or {})}
        tools = tools or None
        self._check(messages, tools, variables)
        side = self._side(tools)
        plain = self._render(side.template, messages, tools, variables)
        texts = itertools.chain(
            caller_texts(messages), caller_texts(tools), caller_texts(list(variables.values()), is_name=True)
        )
        if not any(map(side.is_risky, texts)):
            return encode_text(self._raw, plain, "messages", add_special_tokens=False).ids
        return side.encode(self._render_disguised(side, plain, messages, tools, variables))

    def _render_disguised(
        self,
        side: _TemplateSide,
        plain: str,
        messages: list[dict[str, object]],
        tools: list[object] | None,
        variables: dict[str, object],
    ) -> str:
        """Render with disguised texts. Any rendering is safe; the one that reads like the plain one is right too."""
        guard = side.guard
        disguised = {name: guard.disguise(value, is_name=True) for name, value in variables.items()}
        given: Any = (guard.disguise(messages), guard.disguise(tools), disguised)
        failure: ChatTemplateError | None = None
        rendered: list[str] = []
        for template in (guard.disguised_template(), side.template):
            try:
                text = self._render(template, *given)
            except ChatTemplateError as error:
                failure = failure or error
                continue
            if guard.reveal(text) == plain:
                return text
            rendered.append(text)
        if not rendered:
            raise failure or ChatTemplateError("the chat template gave no text")
        return rendered[0]

    def _check(self, messages: object, tools: object, variables: Mapping[str, object]) -> None:
        if not isinstance(messages, list) or not messages:
            raise ChatTemplateError("messages must be a list of at least one message")
        for message in cast("list[object]", messages):
            if not isinstance(message, dict):
                raise ChatTemplateError("each message must be a map")
            fields = cast("dict[str, object]", message)
            if not isinstance(fields.get("role"), str):
                raise ChatTemplateError("the role of each message must be a string")
            if not isinstance(fields.get("content"), str | None):
                raise ChatTemplateError("the content of each message must be a string")
        _check_json(cast("object", messages), "messages")
        if tools is not None and not (isinstance(tools, list) and _all_maps(cast("list[object]", tools))):
            raise ChatTemplateError("tools must be a list of maps", param="tools")
        _check_json(cast("object", tools), "tools")
        for name in variables:
            if name in self._reserved:
                raise ChatTemplateError(f"the template variable {name!r} is reserved", param="chat_template_kwargs")
        if not isinstance(variables["add_generation_prompt"], bool):
            raise ChatTemplateError("add_generation_prompt must be a boolean", param="chat_template_kwargs")
        _check_json(dict(variables), "chat_template_kwargs")

    def _side(self, tools: list[object] | None) -> _TemplateSide:
        try:
            template: str = self._pretrained.get_chat_template(tools=tools)
        except ValueError:  # no template, or several and no default
            raise ChatTemplateError("the model has no chat template", code="unsupported") from None
        with self._lock:
            if template not in self._sides:
                try:
                    refuse_large_operations(template)
                    self._sides[template] = _TemplateSide(self._raw, self._added, template)
                except _template_failures() as error:
                    raise _refusal(error) from error
            return self._sides[template]

    def _render(self, template: str, messages: object, tools: object, variables: Mapping[str, object]) -> str:
        try:
            with render_limits():
                text: str = self._pretrained.apply_chat_template(
                    messages, tools=tools, chat_template=template, tokenize=False, **variables
                )
        except _template_failures() as error:
            raise _refusal(error) from error
        if len(text) > MAX_RENDERED_CHARS:
            raise ChatTemplateError(f"the rendered chat has more than {MAX_RENDERED_CHARS} characters")
        return text


class _TemplateSide:
    """One template of the model: its guard, and the tokenizer that goes with it."""

    def __init__(self, raw: Tokenizer, added: dict[int, AddedToken], template: str) -> None:
        self.template = template
        self._raw = raw
        self._lock = threading.Lock()  # around the making of the private tokenizer
        self._private: _PrivateTokenizer | None = None
        self._control = {i: t for i, t in added.items() if is_control(t.content, t.special, template)}
        self._normalizer = raw.normalizer if any(token.normalized for token in self._control.values()) else None
        controls = [token.content for token in self._control.values()]
        self.guard = ChatGuard(controls + [self._normalized(token) for token in controls], template)

    def is_risky(self, item: CallerText) -> bool:
        """Whether a text of the caller could play a part in a control token, as it is or once it is normalised."""
        if self.guard.is_risky(item):
            return True
        return self._normalizer is not None and self.guard.is_risky(CallerText(self._normalized(item.text)))

    def encode(self, disguised: str) -> list[int]:
        """Ids of a disguised chat. Raises ChatTemplateError if a control token is not the template's own."""
        private = self._private_tokenizer()
        encoding = encode_text(private.tokenizer, disguised, "messages", add_special_tokens=False)
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id not in self._control or token_id == private.unknown_id:
                continue
            token = self._control[token_id].content
            if disguised[start:end].strip() != token.strip():
                # Some vocabularies hold control tokens as ordinary entries, which plain text can hit.
                raise ChatTemplateError(f"the tokenizer cannot encode the text {token!r} as plain text")
        return encoding.ids

    def _normalized(self, text: str) -> str:
        # Tokens that are looked for after normalisation can arise from text that only normalises to theirs.
        if self._normalizer is None:
            return text
        with panics_as_errors():
            return self._normalizer.normalize_str(text)

    def _private_tokenizer(self) -> _PrivateTokenizer:
        from tokenizers import Tokenizer, normalizers

        with self._lock:
            if self._private is None:
                content = json.loads(self._raw.to_str())
                for token in content["added_tokens"]:
                    # Looked for in the text as rendered, that is before the disguise is off.
                    token["normalized"] = token["normalized"] and token["id"] not in self._control
                tokenizer = Tokenizer.from_str(json.dumps(content))
                steps: list[Any] = [normalizers.Replace(old, new) for old, new in self.guard.reveal_steps]
                own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
                tokenizer.normalizer = normalizers.Sequence(steps + own)
                unknown_id = content["model"].get("unk_id")
                if unknown_id is None and (unknown := content["model"].get("unk_token")) is not None:
                    unknown_id = tokenizer.token_to_id(unknown)
                self._private = _PrivateTokenizer(tokenizer, unknown_id)
            return self._private


@dataclass(frozen=True, slots=True)
class _PrivateTokenizer:
    """The model's tokenizer, with a normalizer that takes the disguise off."""

    tokenizer: Tokenizer
    unknown_id: int | None  # the control token that stands for characters the vocabulary lacks: not forged


def encode_text(tokenizer: Tokenizer, text: str, param: str, *, add_special_tokens: bool) -> Encoding:
    """Encode with errors that say whose fault it is. Raises RequestRefusedError, naming `param`.

    As a batch of one: the library holds the interpreter's lock while it encodes a single text, for a second or more
    where that is a megabyte, and no step and no renewal of a lease could run beside it. For a batch it lets go.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestRefusedError("invalid_request", "a text holds a lone surrogate", param) from None
    try:
        with panics_as_errors():
            return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
    except Exception as error:  # the library raises nothing narrower, for a vocabulary without its unknown token say
        raise RequestRefusedError("internal", f"the tokenizer cannot encode the text: {error}") from error


def _all_maps(values: Iterable[object]) -> bool:
    return all(isinstance(value, dict) for value in values)


def _check_json(value: object, param: str, depth: int = 0) -> None:
    """Refuse what is not made of JSON's types, keys not strings, and nesting that would exhaust the stack."""
    if depth > MAX_NESTING:
        raise ChatTemplateError(f"nested deeper than {MAX_NESTING}", param=param)
    if isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            if not isinstance(key, str):
                raise ChatTemplateError("keys must be strings", param=param)
            _check_json(item, param, depth + 1)
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            _check_json(item, param, depth + 1)
    elif not isinstance(value, str | int | float | None):
        raise ChatTemplateError(f"{type(value).__name__} is no type of JSON", param=param)


def _template_failures() -> tuple[type[Exception], ...]:
    """What rendering a template can raise: its own refusals, and whatever its expressions do with the values."""
    from jinja2 import TemplateError

    # SyntaxError: what jinja2 makes of the template is nested more deeply than Python's own code may be
    errors = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)
    return (TemplateError, TemplateLimitError, *errors)


def _refusal(error: Exception) -> ChatTemplateError:
    from jinja2 import TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError | SyntaxError):
        return ChatTemplateError(f"the model's chat template is broken: {str(error)[:MAX_SAID_CHARS]}", "unsupported")
    if isinstance(error, TemplateLimitError):
        return ChatTemplateError(f"the model's chat template {error}", "unsupported")
    return ChatTemplateError(f"the chat template refused the chat: {str(error)[:MAX_SAID_CHARS]}")
