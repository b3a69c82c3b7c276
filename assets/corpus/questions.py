"""Questions with their answers, each also as a plain statement for raw text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from assets.corpus import definitions, facts
from assets.corpus.choose import Chooser
from assets.corpus.language import Word, capitalised


class Item(NamedTuple):
    """One fact: said plainly, asked, and answered."""

    plain: str
    question: str
    answer: str


def capital_en(choose: Chooser) -> Item:
    """A capital, in English."""
    country, city, _, _, flag = choose.even(facts.CAPITALS)
    if country == "South Korea" and choose.chance(0.4):
        country = "Korea"
    stop = "" if city.endswith(".") else "."
    plain = f"The capital of {country} is {city}{stop}"
    question = choose.pick([
        f"What is the capital of {country}?", f"What's the capital of {country}?",
        f"Which city is the capital of {country}?",
        f"Tell me the capital of {country}.", f"Do you know the capital of {country}?",
    ])  # fmt: skip
    return Item(plain, question, choose.pick([plain, f"{plain} {flag}"]))


def capital_ko(choose: Chooser) -> Item:
    """A capital, in Korean."""
    _, _, country, city, flag = choose.even(facts.CAPITALS)
    if country == "한국" and choose.chance(0.3):
        country = "대한민국"
    plain = f"{country}의 수도는 {city}입니다."
    question = choose.pick([
        f"{country}의 수도는 어디인가요?", f"{country}의 수도는 어디야?", f"{country}의 수도를 알려 줘.",
        f"{country}의 수도는?", f"{country} 수도가 어디예요?", f"{country}의 수도는 어디입니까?",
    ])  # fmt: skip
    return Item(plain, question, choose.pick([plain, f"{plain} {flag}"]))


def city_en(choose: Chooser) -> Item:
    """The country of a capital, in English."""
    country, city, _, _, _ = choose.even(facts.CAPITALS)
    plain = f"{city} is the capital of {country}."
    return Item(plain, choose.pick([f"Which country is {city} in?", f"Where is {city}?"]), f"{city} is in {country}.")


def flag_both(choose: Chooser) -> Item:
    """A flag emoji."""
    country, _, korean, _, flag = choose.even(facts.CAPITALS)
    if country == "South Korea" and choose.chance(0.4):
        country = "Korea"
    if choose.chance(0.5):
        return Item(f"The flag of {country} is {flag}", f"Show me the flag of {country}.", f"Here it is: {flag}")
    return Item(f"{korean}의 국기는 {flag}입니다.", f"{korean} 국기를 보여 줘.", f"{korean}의 국기는 {flag}입니다.")


def color_en(choose: Chooser) -> Item:
    """The colour of a thing, in English."""
    thing, verb, color, _, _ = choose.even(facts.COLORS)
    plain = f"{capitalised(thing)} {verb} {color}."
    return Item(plain, choose.pick([f"What color {verb} {thing}?", f"Which color {verb} {thing}?"]), plain)


def color_ko(choose: Chooser) -> Item:
    """The colour of a thing, in Korean."""
    _, _, _, thing, color = choose.even(facts.COLORS)
    plain = f"{Word(thing):은} {color}입니다."
    return Item(plain, choose.pick([f"{Word(thing):은} 무슨 색인가요?", f"{Word(thing):은} 무슨 색이야?"]), plain)


def creature_en(choose: Chooser) -> Item:
    """Something about an animal, in English."""
    animal, sound, legs, young, home = choose.even(facts.CREATURES)
    name = Word(animal)
    return choose.even([
        Item(f"{name:A} says {sound}.", f"What does {name:a} say?", f"{name:A} says {sound}."),
        Item(f"{name:A} has {legs} legs.", f"How many legs does {name:a} have?", f"{name:A} has {legs} legs."),
        Item(f"A young {name} is called {Word(young):a}.", f"What is a young {name} called?",
             f"A young {name} is called {Word(young):a}."),
        Item(f"{name:A} lives in {home}.", f"Where does {name:a} live?", f"{name:A} lives in {home}."),
    ])  # fmt: skip


def creature_ko(choose: Chooser) -> Item:
    """An animal's sound, in Korean."""
    animal, sound = choose.even(facts.KOREAN_SOUNDS)
    plain = f"{Word(animal):은} {sound} 하고 웁니다."
    return Item(plain, choose.pick([f"{Word(animal):은} 어떻게 우나요?", f"{Word(animal):은} 어떻게 울어?"]), plain)


def opposite_en(choose: Chooser) -> Item:
    """A pair of opposites, in English."""
    pair = choose.even(facts.OPPOSITES)
    left, right = pair if choose.chance(0.5) else pair[::-1]
    plain = f"The opposite of {left} is {right}."
    return Item(plain, f"What is the opposite of {left}?", plain)


def opposite_ko(choose: Chooser) -> Item:
    """A pair of opposites, in Korean."""
    pair = choose.even(facts.KOREAN_OPPOSITES)
    left, right = pair if choose.chance(0.5) else pair[::-1]
    plain = f"{left}의 반대말은 {right}입니다."
    return Item(plain, choose.pick([f"{left}의 반대말은 무엇인가요?", f"{left}의 반대말은 뭐야?"]), plain)


def sum_both(choose: Chooser) -> Item:
    """A sum of two numbers up to ten."""
    left, right = choose.rng.randint(0, 10), choose.rng.randint(0, 10)
    total = left + right
    plain = f"{left} + {right} = {total}"
    if choose.chance(0.7):
        question = choose.pick([f"What is {left} + {right}?", f"What is {left} plus {right}?", f"{left} + {right} = ?"])
        return Item(plain, question, f"{left} plus {right} is {total}.")
    question = choose.pick([f"{left} 더하기 {Word(right):은} 얼마인가요?", f"{left} 더하기 {Word(right):은}?"])
    return Item(f"{left} 더하기 {Word(right):은} {total}입니다.", question, f"답은 {total}입니다.")


def calendar_en(choose: Chooser) -> Item:
    """The order of days and months, in English."""
    names, unit = choose.even([(facts.DAYS, "day"), (facts.MONTHS, "month")])
    index = choose.rng.randrange(len(names))
    now, then = names[index], names[(index + 1) % len(names)]
    if choose.chance(0.5):
        plain = f"The {unit} after {now} is {then}."
        return Item(plain, f"Which {unit} comes after {now}?", f"{then} comes after {now}.")
    plain = f"The {unit} before {then} is {now}."
    return Item(plain, f"Which {unit} comes before {then}?", f"{now} comes before {then}.")


def calendar_ko(choose: Chooser) -> Item:
    """The order of days, in Korean."""
    index = choose.rng.randrange(7)
    now, then = facts.KOREAN_DAYS[index], facts.KOREAN_DAYS[(index + 1) % 7]
    plain = f"{now} 다음 날은 {then}입니다."
    return Item(plain, choose.pick([f"{now} 다음 날은 무슨 요일인가요?", f"{now} 다음은 무슨 요일이야?"]), plain)


def lists_both(choose: Chooser) -> Item:
    """Things to recite."""
    english = ", ".join(facts.NUMBERS[1:11])
    korean, days = ", ".join(facts.KOREAN_NUMBERS), ", ".join(facts.KOREAN_DAYS)
    return choose.even([
        Item(f"Numbers: {english}.", "Count to ten.", f"{capitalised(english)}."),
        Item(f"Days: {', '.join(facts.DAYS)}.", "Name the days of the week.",
             f"The days of the week are {', '.join(facts.DAYS[:6])}, and Sunday."),
        Item(f"Months: {', '.join(facts.MONTHS)}.", "Name the months of the year.",
             f"The months are {', '.join(facts.MONTHS[:11])}, and December."),
        Item(f"숫자: {korean}.", "하나부터 열까지 세어 줘.", f"{korean}."),
        Item(f"요일: {days}.", "요일을 모두 말해 줘.", f"{days}입니다."),
    ])  # fmt: skip


def translation_both(choose: Chooser) -> Item:
    """A word in the other language."""
    english, korean = choose.even(facts.TRANSLATIONS)
    if choose.chance(0.5):
        question = choose.pick([f"How do you say {english} in Korean?", f"What is {english} in Korean?"])
        return Item(f"In Korean, {english} is {korean}.", question, f"In Korean, {english} is {korean}.")
    plain = f"{Word(korean):은} 영어로 {english}입니다."
    question = choose.pick([f"{Word(korean):은} 영어로 무엇인가요?", f"{Word(korean):을} 영어로 뭐라고 해?"])
    return Item(plain, question, plain)


def emoji_both(choose: Chooser) -> Item:
    """An emoji that was asked for by name."""
    english, korean, emoji = choose.even(facts.EMOJI_NAMES)
    if choose.chance(0.5):
        return Item(f"This is {english}: {emoji}", f"Show me an emoji of {english}.", f"Here you are: {emoji}")
    return Item(f"{korean} 이모지: {emoji}", f"{korean} 이모지를 보여 줘.", f"여기 있어요: {emoji}")


def definition_en(choose: Chooser) -> Item:
    """A short explanation, in English."""
    subject, text = choose.even(definitions.ENGLISH)
    forms = [f"What is {subject}?", f"Can you explain what {subject} is?", f"Tell me what {subject} is."]
    question = choose.pick(forms)
    return Item(text, question, text)


def definition_ko(choose: Chooser) -> Item:
    """A short explanation, in Korean."""
    subject, text = choose.even(definitions.KOREAN)
    name = Word(subject)
    question = choose.pick([
        f"{name:이} 무엇인가요?", f"{name:은} 무엇인가요?", f"{name:이} 뭐야?", f"{name}에 대해 알려 줘.",
        f"{name:이} 뭐예요?",
    ])  # fmt: skip
    return Item(text, question, text)


Source = Callable[[Chooser], Item]
ENGLISH: Sequence[Source] = (
    capital_en, capital_en, capital_en, city_en, color_en, creature_en, opposite_en, sum_both, sum_both, sum_both,
    calendar_en, lists_both, translation_both, emoji_both, flag_both, definition_en, definition_en,
)  # fmt: skip
KOREAN: Sequence[Source] = (
    capital_ko, capital_ko, capital_ko, color_ko, creature_ko, opposite_ko, calendar_ko, definition_ko, definition_ko,
    flag_both, sum_both,
)  # fmt: skip


def item(choose: Chooser, korean: bool) -> Item:
    """One fact of the given language's kinds."""
    return choose.even(KOREAN if korean else ENGLISH)(choose)
