"""What the demo asks: stories and chats in two languages, greedy and sampled, one to be cancelled, one in a hurry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..clients.keys import Priority

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
    notes: tuple[str, ...] = field(default=())  # shown beside the title


def demo_prompts(own: Sequence[str] = ()) -> tuple[DemoPrompt, ...]:
    """The demo's requests, and one for each text of `own`."""
    return (
        _story("story", "Once upon a time, there was a little fox named", max_tokens=110),
        _story("옛이야기", "옛날 옛적에", max_tokens=110, temperature=0.0),
        _story("sampled", "One day, a small robot found", max_tokens=110, seed=1),
        _story("same, other seed", "One day, a small robot found", max_tokens=110, seed=2),
        _chat("chat", "Tell me a story about a cat.", max_tokens=110, seed=3),
        _chat("채팅", "고양이 이야기를 들려줘.", max_tokens=110, seed=4),
        _chat("poem", "Write a short poem.", max_tokens=80, temperature=0.0),
        _chat("emoji 🚀", "Show me an emoji of a rocket.", max_tokens=40, temperature=0.0),
        DemoPrompt(
            "endless",
            "The sea was",
            {"prompt": "The sea was", "max_tokens": 1500, "ignore_eos": True, "seed": 5, **_SAMPLED},
            cancel_after=60,
            notes=("cancelled on the way",),
        ),
        _story("low priority", "In a quiet village lived", max_tokens=80, seed=6, priority="low"),
        _story("낮은 순위", "어느 날 아침", max_tokens=80, seed=7, priority="low"),
        DemoPrompt(
            "in a hurry",
            "Hello!",
            {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 24, "temperature": 0.0},
            priority="high",
            delay_s=0.4,
            notes=("high priority", "sent last"),
        ),
        *(_story("yours", text, max_tokens=110, seed=100 + i) for i, text in enumerate(own)),
    )


def _story(title: str, prompt: str, *, priority: Priority = "normal", **options: object) -> DemoPrompt:
    return DemoPrompt(title, prompt, {"prompt": prompt, **_SAMPLED, **options}, priority)


def _chat(title: str, message: str, **options: object) -> DemoPrompt:
    messages = [*_SHARED, {"role": "user", "content": message}]
    return DemoPrompt(title, f"{message}\n", {"messages": messages, **_SAMPLED, **options})
