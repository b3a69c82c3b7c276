"""Stories: a cast and a setting (some of it given by a prompt), put through one or more plots."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from assets.corpus import plots_en, plots_ko, words_en, words_ko
from assets.corpus.choose import Chooser
from assets.corpus.language import Word, capitalised, made_up_korean_name, made_up_name
from assets.corpus.plots_en import Plot

MADE_UP_SHARE = 0.5
FEMININE_ENDS = tuple("aeiy")


@dataclass
class Wish:
    """What a prompt asks a story to be about; whatever is left out, the story chooses by itself."""

    hero: str | None = None
    name: str | None = None
    friend: str | None = None
    friend_name: str | None = None
    place: str | None = None
    things: list[str] = field(default_factory=list[str])
    adjective: str | None = None

    @property
    def subject(self) -> str:
        """The word that decides the style of the story."""
        return self.hero or self.place or (self.things[0] if self.things else "") or self.name or ""


class Lexicon:
    """The words of one language, and how a story's slots are filled with them."""

    def __init__(self, korean: bool) -> None:
        words = words_ko if korean else words_en
        plots = plots_ko if korean else plots_en
        self.korean = korean
        self.animals: Sequence[str] = tuple(words.ANIMALS)
        self.people: Sequence[str] = tuple(words.PEOPLE)
        self.places: Sequence[str] = tuple(words.PLACES)
        self.things: Sequence[str] = tuple(words.THINGS)
        self.askable_heroes: Sequence[str] = (*words.ANIMALS, *words.PEOPLE, *words.MORE_HEROES)
        self.askable_things: Sequence[str] = (*words.THINGS, *words.MORE_THINGS)
        self.names: Sequence[str] = words.NAMES
        self.plots: Sequence[Plot] = plots.PLOTS
        self.openings: Sequence[str] = plots.OPENINGS
        self.links: Sequence[str] = plots.LINKS
        self.endings: Sequence[str] = words.GOOD_ENDS
        self.words = words
        self.emoji = {**words.ANIMALS, **words.PEOPLE, **words.THINGS, **place_emoji(words.PLACES)}

    def new_name(self, choose: Chooser) -> str:
        """A name for a prompt: often one that was never seen before."""
        if choose.chance(MADE_UP_SHARE):
            return made_up_korean_name(choose) if self.korean else made_up_name(choose)
        return choose.even(self.names)


def place_emoji(places: Mapping[str, str | tuple[str, str]]) -> dict[str, str]:
    """The emoji of each place, whichever form the table has."""
    return {place: value if isinstance(value, str) else value[1] for place, value in places.items()}


ENGLISH = Lexicon(korean=False)
KOREAN = Lexicon(korean=True)


def pick_other(choose: Chooser, options: Sequence[str], taken: Sequence[str | None]) -> str:
    """A favourite that is not already in use."""
    return choose.pick([option for option in options if option not in taken])


def pronouns(name: str) -> dict[str, str]:
    """English pronouns that follow from the sound of a name, so that they can be told from a made-up one too."""
    she, her, hem = ("she", "her", "her") if name.endswith(FEMININE_ENDS) else ("he", "his", "him")
    return {"she": she, "She": she.capitalize(), "her": her, "Her": her.capitalize(), "hem": hem}


def with_the(place: str) -> str:
    """An English place with its article; proper names have none."""
    return place if place[0].isupper() else f"the {place}"


def cast(lexicon: Lexicon, wish: Wish, choose: Chooser) -> dict[str, str]:
    """The slots that stay the same for a whole story."""
    words = lexicon.words
    hero = wish.hero or choose.pick([*lexicon.animals[:12], *lexicon.people[:6]])
    name = wish.name or pick_other(choose, lexicon.names, [wish.friend_name])
    friend = wish.friend or choose.pick(words.FRIENDS)
    place = wish.place or choose.pick(lexicon.places)
    slots = {
        "H": name, "hero": hero, "F": wish.friend_name or choose.pick(words.FRIEND_NAMES), "friend": friend,
        "place": place, "adj": wish.adjective or choose.pick(words.ADJECTIVES),
        "friend_adj": choose.pick(words.ADJECTIVES[3:]),
        "lesson": choose.pick(words.LESSONS),
    }  # fmt: skip
    if not lexicon.korean:
        at = f"{words_en.PLACES[place][0]} {with_the(place)}"
        slots |= {"at": at, "At": capitalised(at), **pronouns(name)}
    return slots


def episode(
    lexicon: Lexicon, slots: Mapping[str, str], plot: Plot, things: Sequence[str], goal: str, choose: Chooser
) -> dict[str, str]:
    """The slots of one episode of a story: its things, its weather, its food."""
    words = lexicon.words
    own = dict(slots)
    own["obj"] = things[0] if things else pick_other(choose, lexicon.things[:16], list(plot.unfit))
    own["gift"] = things[1] if len(things) > 1 else pick_other(choose, lexicon.things[:16], [own["obj"]])
    own["goal"] = goal if lexicon.korean else with_the(goal)
    own["to"] = f"to {own['goal']}"
    own["thing_adj"] = choose.pick(words.THING_ADJECTIVES)
    own["weather"] = choose.pick(words.WEATHER)
    own["food"] = choose.pick(words.FOODS)
    return own


def fill(template: str, slots: Mapping[str, str]) -> str:
    """The template with its slots filled by self-inflecting words."""
    return string.Formatter().vformat(template, (), {key: Word(value) for key, value in slots.items()})


def plot_for(lexicon: Lexicon, things: Sequence[str], used: Sequence[Plot], choose: Chooser) -> Plot:
    """A plot that names all wished things and has not been told yet."""
    fitting = [plot for plot in lexicon.plots if plot not in used and not plot.unfit & set(things[:1])]
    if len(things) > 1:
        fitting = [plot for plot in fitting if "gift" in plot.names]
    return choose.pick(fitting)


def told(lexicon: Lexicon, wish: Wish, choose: Chooser, episodes: int = 1) -> str:
    """One story in one paragraph per episode."""
    choose = choose.styled(wish.subject)
    slots = cast(lexicon, wish, choose)
    # A second wished-for place would be the goal of a journey; any other goal is one the hero does not live at.
    goal = pick_other(choose, lexicon.places[:14], [slots["place"]])
    used: list[Plot] = []
    paragraphs: list[str] = []
    things: Sequence[str] = wish.things
    for number in range(min(episodes, len(lexicon.plots))):
        plot = plot_for(lexicon, things, used, choose)
        used.append(plot)
        own = episode(lexicon, slots, plot, things, goal, choose)
        opening = choose.pick(lexicon.openings if number == 0 else lexicon.links)
        sentences = [opening, *(choose.pick(beat) for beat in plot.beats)]
        if number == episodes - 1 or number == len(lexicon.plots) - 1:
            sentences.append(choose.pick(lexicon.endings))
        paragraphs.append(" ".join(fill(sentence, own) for sentence in sentences))
        things = []
    return "\n\n".join(paragraphs)


def finished(lexicon: Lexicon, wish: Wish, choose: Chooser, episodes: int = 1) -> str:
    """A story with a title before it, or a closing line after it, or neither."""
    story = told(lexicon, wish, choose, episodes)
    if choose.chance(0.25):
        emoji = lexicon.emoji.get(wish.hero or wish.place or "", "✨")
        story += f" 끝. {emoji}" if lexicon.korean else f" The end. {emoji}"
    return story


def random_wish(lexicon: Lexicon, choose: Chooser) -> Wish:
    """A wish as a raw story's opening would carry: mostly a hero with a name."""
    wish = Wish(hero=choose.even(lexicon.askable_heroes), name=lexicon.new_name(choose))
    if choose.chance(0.5):
        wish.place = choose.even(lexicon.places)
    if choose.chance(0.2):
        wish.friend_name = lexicon.new_name(choose)
    return wish
