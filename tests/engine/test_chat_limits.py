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
    with pytest.raises(ChatTemplateError, match=r"took 64 MiB|wrote 67108864 char|at once|after 5 s") as refused:
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


MUCH = "{% set n = 9999999 %}{% set k = 99999 %}{% set s = 'x' * k %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'x' * (n * k) }}", "makes 999989900001 characters at once"),
        ("{{ n * k * s }}", "characters at once"),
        ("{{ [0] * n }}", "makes 9999999 items at once"),
        ("{{ ([0] * k + [1] * n) | length }}", "items at once"),
        ("{{ s.encode() * k }}", "characters at once"),
        ("{{ " + " ~ ".join(["s"] * 200) + " }}", "makes 19999800 characters at once"),
        ("{% set m = namespace(n=n) %}{% for i in range(99) %}{% set m.n = m.n * m.n %}{% endfor %}", "4096 bits"),
        ("{{ 'x'.center(n * k) }}", "characters at once"),
        ("{{ ('x' | attr('ljust'))(n * k) }}", "characters at once"),
        ("{{ 'x' | center(n * k) }}", "characters at once"),
        ("{{ ['x'] | map('center', n * k) | list }}", "characters at once"),
        ("{{ (1).to_bytes(n * k, 'big') }}", "characters at once"),
        ("{{ '\t'.expandtabs(n * k) }}", "characters at once"),
        ("{{ s.replace('x', s) }}", "characters at once"),
        ("{{ s | replace('x', s) }}", "characters at once"),
        ("{{ s.join(['y'] * k) }}", "characters at once"),
        ("{{ (['y'] * k) | join(s) }}", "characters at once"),
        ("{{ (messages * 999) | join(s, attribute='content') }}", "characters at once"),
        ("{{ 'a\nb' | indent(n * k) }}", "characters at once"),
        ("{{ s.translate({120: s}) }}", "translate"),
        ("{{ '%999999999d' % 1 }}", "width of millions"),
        ("{{ '%*d' % (n, 1) }}", "width of millions"),
        ("{{ '%.999999999f' | format(1) }}", "width of millions"),
        ("{{ '{:999999999d}'.format(1) }}", "width of millions"),
        ("{{ '{:{}}'.format(1, n) }}", "width of millions"),
        ("{{ '{x:>{n}}'.format_map({'x': 1, 'n': n}) }}", "width of millions"),
        ("{{ messages | tojson(indent=n * k) }}", "tojson a number above 100"),
        ("{{ 1.5 | round(n) }}", "round a number above 100"),
        ("{{ ([[1] * 999] * k) | sum(start=[]) | length }}", "no numbers"),
        ("{{ ('<' * n) | striptags }}", "No filter named 'striptags'"),
        ("{{ s | urlize }}", "No filter named 'urlize'"),
        ("{% if true %}" * 200 + "{% endif %}" * 200, "is broken: too many levels"),
        ("{% for x in messages %}" * 30 + "{% endfor %}" * 30, "is broken: too many statically nested"),
    ],
)
def test_what_a_single_operation_would_make_is_seen_before_it(tmp_path: Path, template: str, words: str) -> None:
    begun_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ChatTemplateError, match=words):
        load(tmp_path, MUCH + template).encode_chat(HI)
    assert time.monotonic() - begun_s < 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '-' * 3 + '=' * messages | length }}{{ 7 % 4 }}{{ 3 * 4 }}", "---=312"),
        ("{{ messages[0].role ~ nothing ~ 5 ~ none }}", "user5None"),
        ("{{ '%s:%5.1f' % ('a', 2.5) }}{{ '%03d' | format(7) }}", "a:  2.5007"),
        ("{{ '{{{0}}} {x:>4}'.format(1, x='y') }}", "{1}    y"),
        ("{{ messages | map(attribute='role') | join('-') }}{{ messages | join(attribute='content') }}", "userhi"),
        ("{{ [1, 2] | join }}{{ ', '.join(['a', 'b']) }}{{ 'abab'.replace('a', 'x', 1) }}", "12a, bxbab"),
        ("{{ 'abab' | replace('a', 'x') }}{{ 'ab' | center(6) }}{{ 'a\nb' | indent(2) }}", "xbxb  ab  a\n  b"),
        ("{{ {'n': 9000000} | tojson }}{{ [1] | tojson(indent=2) }}", '{"n": 9000000}[\n  1\n]'),
        ("{{ [1, 2] | sum }}{{ messages | sum(attribute='x', start=0) if false }}{{ 2.345 | round(2) }}", "32.35"),
        ("{{ ([1] + [2]) | length }}{{ 'x'.ljust(3) }}{{ 9000000 * 1000 }}", "2x  9000000000"),
    ],
)
def test_what_templates_do_is_done_as_ever(tmp_path: Path, template: str, text: str) -> None:
    tokenizer = load(tmp_path, template)
    assert tokenizer.raw.decode(tokenizer.encode_chat(HI), skip_special_tokens=False) == text


def test_what_a_template_says_is_cut(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="refused the chat: xxx") as refused:
        load(tmp_path, "{{ raise_exception('x' * 1000000) }}").encode_chat(HI)
    assert len(str(refused.value)) < 2000


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
