"""What the demo asks: stories and chats in two languages, greedy and sampled, one to be cancelled, one in a hurry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..clients.keys import Priority

_MIN_TOKENS = 40  # a prompt may look like a whole text to a model: it still is to give something to see
_MAX_TOKENS = 160
_SAMPLED = {"temperature": 0.7, "top_p": 0.9}
# Chats that begin alike: after the first, the prefix cache serves this part of the prompt.
_SHARED: tuple[dict[str, str], ...] = (
    {"role": "system", "content": "You are a friendly storyteller."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hello! 👋 How can I help you today?"},
    {"role": "user", "content": "Good morning!"},
    {"role": "assistant", "content": "Good morning! ☀️ I hope you slept well."},
)


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One request of the demo."""

    title: str  # what its panel is called
    shown: str  # the prompt as its panel shows it; the text follows it
    options: Mapping[str, Any]  # fields of the job
    priority: Priority = "normal"
    delay_s: float = 0.0  # it is sent so long after the first
    cancel_after: int | None = None  # tokens after which the demo cancels it


def demo_prompts(own: Sequence[str] = ()) -> tuple[DemoPrompt, ...]:
    """The demo's requests, and one for each text of `own`."""
    return (
        _story("story", "Once upon a time, there was a little fox named", temperature=0.0),
        _story("옛이야기", "옛날 옛적에", seed=8),
        _story("two choices", "One day, a small robot found", seed=1, n=2),
        _chat("chat", "Tell me a story about a cat.", seed=3),
        _story("sampled", "In the middle of the forest", seed=2),
        _endless("to cancel", "The sea was", after=50, seed=5),
        # These begin as the chat above does, and come when the cache knows its beginning.
        _chat("채팅", "고양이 이야기를 들려줘.", delay_s=0.3, seed=4),
        _chat("poem", "Write a short poem.", delay_s=0.3, temperature=0.0),
        _chat("emoji 🚀", "Show me an emoji of a rocket.", delay_s=0.3, max_tokens=40, temperature=0.0),
        _chat("question", "What is the capital of France?", delay_s=0.3, max_tokens=40, temperature=0.0),
        _chat("질문", "한국의 수도는 어디인가요?", delay_s=0.3, max_tokens=40, temperature=0.0),
        _chat("joke", "Tell me a joke.", delay_s=0.3, max_tokens=60, temperature=0.0),
        _story("story", "In a quiet village lived", priority="low", delay_s=0.3, seed=6),
        _story("이야기", "옛날 어느 마을에", priority="low", delay_s=0.3, seed=7),
        _story("story", "There once was a clock that", priority="low", delay_s=0.3, seed=9),
        _chat("in a hurry", "Hello!", priority="high", delay_s=0.5, max_tokens=24, temperature=0.0),
        *(_story("yours", text, seed=100 + i) for i, text in enumerate(own)),
    )


def _story(
    title: str, prompt: str, *, priority: Priority = "normal", delay_s: float = 0.0, **options: object
) -> DemoPrompt:
    job = {"prompt": prompt, "min_tokens": _MIN_TOKENS, "max_tokens": _MAX_TOKENS, **_SAMPLED, **options}
    return DemoPrompt(title, prompt, job, priority, delay_s)


def _chat(
    title: str, message: str, *, priority: Priority = "normal", delay_s: float = 0.0, **options: object
) -> DemoPrompt:
    messages = [*_SHARED, {"role": "user", "content": message}]
    job = {"messages": messages, "max_tokens": _MAX_TOKENS, **_SAMPLED, **options}
    return DemoPrompt(title, f"{message}\n", job, priority, delay_s)


def _endless(title: str, prompt: str, *, after: int, **options: object) -> DemoPrompt:
    job = {"prompt": prompt, "max_tokens": 1500, "ignore_eos": True, **_SAMPLED, **options}
    return DemoPrompt(title, prompt, job, cancel_after=after)
