"""Chat templates of models that mean harm: each ends soon, with an error of ours, and reaches nothing."""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.engine.chat import ChatTemplateError
from headrace.engine.chat_limits import TemplateLimitError, render_limits
from headrace.engine.tokenizer import ModelTokenizer, load_tokenizer
from tests.support import chat_templates
from tests.support import tokenizer_zoo as zoo

HI: list[dict[str, object]] = [{"role": "user", "content": "hi"}]


def load(tmp_path: Path, template: str) -> ModelTokenizer:
    return load_tokenizer(zoo.save(zoo.byte_level(), tmp_path, template, {"bos_token": "<|endoftext|>"}))


FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "body", ["", "{% set x = b %}", "{{ loop.index and '' }}", "{{ messages | tojson | length and '' }}"]
)
def test_a_template_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr("headrace.engine.chat.render_limits", lambda: render_limits(limit_s=0.3))
    tokenizer = load(tmp_path, FOREVER.replace("BODY", body))
    begun_s = time.monotonic()
    with pytest.raises(ChatTemplateError, match=r"was stopped after 0\.3 s") as refused:
        tokenizer.encode_chat(HI)
    assert time.monotonic() - begun_s < 3
    assert refused.value.code == "unsupported"


DOUBLING = "{% set s = namespace(x='xxxxxxxx') %}{% for i in range(99999) %}{% set s.x = s.x STEP %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        DOUBLING.replace("STEP", "~ s.x"),
        DOUBLING.replace("STEP", "+ s.x"),
        DOUBLING.replace("STEP", "| replace('x', 'xx')"),
        FOREVER.replace("BODY", "{{ 'x' * loop.index }}"),
        FOREVER.replace("BODY", "{{ 'x' * 99999 }}"),  # always the same text, which takes no memory until the end
    ],
)
def test_a_template_that_builds_gigantic_texts_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr("headrace.engine.chat.render_limits", lambda: render_limits(limit_bytes=64 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChatTemplateError, match=r"was stopped after it (took 64 MiB|wrote 67108864 char)") as refused:
        load(tmp_path, template).encode_chat(HI)
    assert refused.value.code == "unsupported"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'x' * 10 ** 10 }}", r"power \(\*\*\)"),
        ("{{ 9 ** 9 ** 9 }}", r"power \(\*\*\)"),
        ("{{ 'x' * 10000000000 }}", "integer above 10000000"),
        ("{{ 'x' | center(0x7fffffffffff) }}", "integer above 10000000"),
        ("{% if false %}{{ '%999999999s' % 1_000_000_000 }}{% endif %}", "integer above 10000000"),
    ],
)
def test_operations_that_nothing_could_stop_are_not_begun(tmp_path: Path, template: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words) as refused:
        load(tmp_path, template).encode_chat(HI)
    assert refused.value.code == "unsupported"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__init__.__globals__['os'].popen('id').read() }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "{{ self.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}",
        "{{ messages | attr('__class__') | attr('__mro__') | first }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append({'role': 'user', 'content': 'more'}) }}",
        "{{ messages[0].update(role='system') }}",
        "{% import 'os' as os %}{{ os }}",
        "{% include '/etc/passwd' %}",
        "{% extends '/etc/passwd' %}",
        "{% from 'os' import system %}",
        "{{ __import__('os').system('id') }}",
        "{{ open('/etc/passwd').read() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_reaches_nothing_outside(tmp_path: Path, template: str) -> None:
    """It is refused, or what it reaches for is nothing."""
    tokenizer = load(tmp_path, template)
    messages = [dict(HI[0])]
    try:
        text = tokenizer.raw.decode(tokenizer.encode_chat(messages), skip_special_tokens=False)
    except ChatTemplateError:
        text = ""
    assert text == ""
    assert messages == HI


def test_a_chat_is_rendered_within_the_limits_and_leaves_no_trace(tmp_path: Path) -> None:
    """A trace function that was there before (a debugger's) is there again, also after an error."""
    tokenizer = load(tmp_path, chat_templates.CHATML)

    def other(*arguments: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(other)
    try:
        assert tokenizer.encode_chat(HI)
        assert sys.gettrace() is other
        with pytest.raises(TemplateLimitError), render_limits(limit_s=-1):
            time.strftime("%Y")
            Path("x").as_posix()
        assert sys.gettrace() is other
    finally:
        sys.settrace(before)


def test_the_limit_is_the_rendering_threads_own(tmp_path: Path) -> None:
    """Another thread that works for long meanwhile is not stopped."""
    ended = threading.Event()
    with render_limits(limit_s=0.05):
        thread = threading.Thread(target=lambda: (time.sleep(0.2), Path("a").as_posix(), ended.set()))
        sys.settrace(None)
        thread.start()
        thread.join()
    assert ended.is_set()
