"""Words that inflect themselves inside format strings.

`"{hero:a}"` gives "a fox" or "an owl"; `"{hero:은}"` gives "여우는" or "곰은". The templates stay readable, and no
sentence can pick the wrong article or particle.
"""

from __future__ import annotations

from assets.corpus.choose import Chooser

HANGUL_FIRST = 0xAC00
HANGUL_LAST = 0xD7A3
FINALS = 28
FINAL_RIEUL = 8
FINAL_OTHER = 1
# How the digits end when read aloud: 영, 일, 이, 삼, 사, 오, 육, 칠, 팔, 구.
DIGIT_FINALS = (FINAL_OTHER, FINAL_RIEUL, 0, FINAL_OTHER, 0, 0, FINAL_OTHER, FINAL_RIEUL, FINAL_RIEUL, 0)

# Each particle by its after-consonant form, which is also the format spec that asks for it.
PARTICLES: dict[str, tuple[str, str]] = {
    "은": ("은", "는"),
    "이": ("이", "가"),
    "을": ("을", "를"),
    "과": ("과", "와"),
    "으로": ("으로", "로"),
    "아": ("아", "야"),
    "이라는": ("이라는", "라는"),
    "이었습니다": ("이었습니다", "였습니다"),
    "이에요": ("이에요", "예요"),
    "이랑": ("이랑", "랑"),
    "이야": ("이야", "야"),
}


def final_consonant(word: str) -> int:
    """The index of the last syllable's final consonant (0: none, or no known sound)."""
    code = ord(word[-1])
    if word[-1] in "0123456789":
        return DIGIT_FINALS[int(word[-1])]
    if not HANGUL_FIRST <= code <= HANGUL_LAST:
        return 0
    return (code - HANGUL_FIRST) % FINALS


def with_particle(word: str, particle: str) -> str:
    """The word followed by the form of the particle that its last sound calls for."""
    closed, open_ = PARTICLES[particle]
    final = final_consonant(word)
    if particle == "으로" and final == FINAL_RIEUL:
        return word + open_
    return word + (closed if final else open_)


def with_article(word: str) -> str:
    """The word with "a" or "an" before it, by its first sound."""
    silent_or_glide = {"hour": "an", "honest": "an", "unicorn": "a", "useful": "a", "ukulele": "a", "one": "a"}
    article = silent_or_glide.get(word.split(maxsplit=1)[0], "an" if word[0].lower() in "aeiou" else "a")
    return f"{article} {word}"


def capitalised(text: str) -> str:
    """The text with its first letter in upper case and the rest left alone."""
    return text[0].upper() + text[1:]


class Word(str):
    """A word or phrase that understands the format specs described above."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        if spec == "":
            return str(self)
        if spec == "a":
            return with_article(self)
        if spec == "A":
            return capitalised(with_article(self))
        if spec == "cap":
            return capitalised(self)
        return with_particle(self, spec)


ENGLISH_STARTS = (
    "b", "bl", "br", "d", "f", "fl", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "pr", "r", "s", "st", "t", "tr", "v",
    "w", "z",
)  # fmt: skip
ENGLISH_MIDDLES = ("l", "m", "n", "r", "s", "t", "v", "nd", "rl", "mb", "b", "d", "k")
ENGLISH_ENDS = (
    "a", "o", "i", "y", "an", "en", "el", "in", "us", "or", "ia", "ie", "ox", "um", "ak", "ek", "ix", "ora", "ara",
    "ina", "eth", "orn", "ana", "esh", "ulo", "art", "ippa", "ando", "on", "er", "is", "et", "ok", "una", "elle",
    "etto",
)  # fmt: skip
KOREAN_STARTS = "가나다두라로루마모미바별보봄사새서소수슬아온유은이재지찬초하한해현호"
KOREAN_ENDS = "나늘다돌라람래령루름리린미민별비빈솔수아연온우원율윤은음이주준찬훈희"


def made_up_name(choose: Chooser) -> str:
    """An English-looking name that is likely new, so that names have to be copied and cannot be memorised."""
    rng = choose.rng
    middle = rng.choice("aeiou") + rng.choice(ENGLISH_MIDDLES)
    return (rng.choice(ENGLISH_STARTS) + middle + rng.choice(ENGLISH_ENDS)).capitalize()


def made_up_korean_name(choose: Chooser) -> str:
    """A Korean-looking name of two syllables."""
    return choose.even(KOREAN_STARTS) + choose.even(KOREAN_ENDS)
