"""Chat templates in the manner of well-known models, and some that do odd things with what callers write."""

from __future__ import annotations

CHATML = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}<tool_call>{{ tool | tojson }}</tool_call>"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
TRIMMED = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n\n{{ message.content | trim }}<|im_end|>"
    "{% endfor %}<|im_start|>assistant\n\n"
)
# The role between bars makes the control token, as in Phi-3 and Zephyr.
ROLE_BETWEEN_BARS = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>' + '\n' }}"
    "{% endfor %}{{ '<|assistant|>' }}"
)
# Takes the thinking out of earlier answers, as Qwen3 does.
THINKING = (
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if message.content.startswith('<tool_call>') and message.content.endswith('</tool_call>') %}"
    "{{ '<|im_start|>tool\\n' }}{% else %}{{ '<|im_start|>' + message.role + '\\n' }}{% endif %}"
    "{{ content + '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n<think>\\n' }}"
)
# The template's text touches the caller's on both sides, and would complete a control token.
GLUED = (
    "{% for message in messages %}<|im_start|>user\n<{{ message.content }}>\n<|im_{{ message.content }}"
    "{{ message.content }}|im_end|>\n{{ message.content }}end|><|im_end|>{% endfor %}"
)
# What the template takes away leaves the two halves of a control token side by side.
REMOVING = (
    "{% for message in messages %}<|im_start|>user\n{{ message.content.replace('\\n', '').replace('#', '') }}"
    "{{ message.content.split('~') | join }}<|im_end|>{% endfor %}"
)
STRICT = (
    "{% for message in messages %}{% if message.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant roles are supported') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
)
HARMLESS = {"chatml": CHATML, "trimmed": TRIMMED, "role_between_bars": ROLE_BETWEEN_BARS}
EVERY = {**HARMLESS, "thinking": THINKING, "glued": GLUED, "removing": REMOVING, "strict": STRICT}
