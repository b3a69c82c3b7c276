"""The model's own tokenizer, as transformers loads it: text and chats to ids, ids to text.

transformers gives the tokenizer and its template; encoding goes straight to the `tokenizers` backend, which keeps no
state between calls, so that several threads may encode at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chat import ChatEncoder, encode_text
from .errors import ModelError
from .json_file import is_file, read_json
from .model_folder import MOST_VOCABULARY_BYTES
from .panics import TokenizerPanicError, panics_as_errors
from .token_table import detokenizer_factory
from .tokenizer_limits import MOST_GROWTH, excess
from .types import Detokenizer, RequestRefusedError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")


class TokenizerError(ModelError, ValueError):
    """The directory holds no tokenizer that can be used here; the message says what is missing."""


class ModelTokenizer:
    """Implements `types.Tokenizer`. Text may hold special-token text, which is parsed as such; chats may not."""

    def __init__(self, name: str, pretrained: Any, raw: RawTokenizer) -> None:
        self.name = name
        self.raw = raw  # without padding and truncation; not to be changed
        always = encode_text(raw, "", "prompt", add_special_tokens=True).ids  # by numbers that need be no entry's
        self.vocab_size = 1 + max(*raw.get_vocab(with_added_tokens=True).values(), *always, -1, -1)  # greatest and one
        self.special_ids = frozenset(i for i, token in raw.get_added_tokens_decoder().items() if token.special)
        self.bos_id: int | None = pretrained.bos_token_id
        self.eos_id: int | None = pretrained.eos_token_id  # the tokenizer's; a model may have further ones
        self.has_chat_template = bool(pretrained.chat_template)
        self._chat = ChatEncoder(pretrained, raw)
        self._new_detokenizer = detokenizer_factory(raw)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer's configuration adds, such as BOS.

        Raises RequestRefusedError for a lone surrogate, which is no text.
        """
        return encode_text(self.raw, text, "prompt", add_special_tokens=True).ids

    def encode_chat(
        self,
        messages: list[dict[str, object]],
        tools: list[object] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Ids of a chat by the model's own template. Raises chat.ChatTemplateError, a RequestRefusedError."""
        return self._chat.encode(messages, tools, template_kwargs)

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer for one choice."""
        return self._new_detokenizer()


def load_tokenizer(model_dir: str | Path, name: str | None = None) -> ModelTokenizer:
    """Load the tokenizer of a model directory. Nothing is downloaded, and no code of the model runs.

    `name` is what the tokenizer is called, the directory's name by default. Raises TokenizerError.
    """
    path = Path(model_dir)
    if not path.is_dir():
        raise TokenizerError(f"{path} is no directory")
    if not any((path / file).is_file() for file in _FILES):
        raise TokenizerError(f"{path} holds no tokenizer (none of {', '.join(_FILES)})")
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    try:
        auto: Any = AutoTokenizer
        with panics_as_errors():
            pretrained: Any = auto.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged file makes transformers or tokenizers raise
        said = _damage(path / "tokenizer.json") or " ".join(str(error).split())
        raise TokenizerError(f"the tokenizer in {path} cannot be loaded: {said}") from error
    raw: object = getattr(pretrained, "backend_tokenizer", None)
    if not isinstance(raw, Tokenizer):
        raise TokenizerError(f"the tokenizer in {path} ({type(pretrained).__name__}) has no tokenizer.json to go by")
    raw.no_padding()
    raw.no_truncation()
    try:
        with panics_as_errors():
            if part := excess(raw):
                raise TokenizerError(
                    f"the {part} in {path / 'tokenizer.json'} may make a text more than {MOST_GROWTH:g} times as long; "
                    "no model needs that"
                )
            return ModelTokenizer(name or path.name, pretrained, raw)
    except (RequestRefusedError, TokenizerPanicError) as error:
        raise TokenizerError(f"the tokenizer in {path} is of no use: {error}") from error


def _damage(path: Path) -> str:
    """What is wrong with a tokenizer.json on the face of it; empty if that is nothing."""
    if not is_file(path):
        return ""
    try:
        values = read_json(path, MOST_VOCABULARY_BYTES)
    except ModelError as error:
        return str(error)
    return "" if isinstance(values.get("model"), dict) else f"{path} has no object under model; take the whole file"
