"""Chats: greetings, questions, and stories on demand, in the message form the chat template takes."""

from __future__ import annotations

from collections.abc import Sequence

from assets.corpus import questions, stories
from assets.corpus.choose import Chooser
from assets.corpus.language import Word
from assets.corpus.stories import Lexicon, Wish

Message = dict[str, str]

SYSTEMS: tuple[str, ...] = (
    "You are a helpful assistant.", "You are a friendly storyteller.", "You are a kind teacher.", "Answer briefly.",
    "당신은 친절한 도우미입니다.", "You are Headrace, a small demo model.", "한국어로 대답하세요.",
)  # fmt: skip

SMALL_TALK_EN: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hello!", "Hi!", "Hi there!", "Hello", "Hey!", "hello", "hi"),
     ("Hello! 👋 How can I help you today?", "Hi! It is nice to meet you. 😊")),
    (("Good morning!", "Good morning"), ("Good morning! ☀️ I hope you slept well.",)),
    (("Good night!", "Good night"), ("Good night! 🌙 Sleep well.",)),
    (("How are you?", "How are you today?", "How are you doing?"),
     ("I am fine, thank you. How are you?", "I am very well, thank you for asking. 😊")),
    (("I am fine, thank you.", "I am fine.", "I'm good, thanks."), ("I am glad to hear that! 😊",)),
    (("Who are you?", "What are you?", "What is your name?", "Introduce yourself."),
     ("I am a small demo model. I tell short stories and answer simple questions. 🤖",)),
    (("What can you do?", "How can you help me?", "Can you help me?"),
     ("I can tell short stories, name capitals, add small numbers, and chat a little. ✨",)),
    (("Thank you!", "Thanks!", "Thank you very much!", "Thanks a lot."), ("You are welcome! 😊", "You're welcome!")),
    (("Goodbye!", "Bye!", "See you later!"), ("Goodbye! 👋 Have a wonderful day.",)),
    (("I am sad.", "I feel sad today."), ("I am sorry to hear that. ❤️ Shall I tell you a story?",)),
    (("I am happy.", "I am so happy today!"), ("That is wonderful! 🎉",)),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
     ("Why did the clock go to school? Because it wanted to learn about the times. 😄",)),
    (("Write a short poem.", "Write a poem.", "Can you write a haiku?", "Write a haiku about the moon."),
     ("The moon is high, the night is deep,\nthe little stars are all asleep.\n"
      "A lantern shines beside the sea,\nand lights the way for you and me. 🌙",)),
)  # fmt: skip

SMALL_TALK_KO: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("안녕하세요!", "안녕하세요", "안녕!", "안녕", "반가워요!"),
     ("안녕하세요! 👋 무엇을 도와드릴까요?", "안녕하세요! 만나서 반갑습니다. 😊")),
    (("좋은 아침이에요!", "좋은 아침!"), ("좋은 아침입니다! ☀️ 오늘도 즐거운 하루 보내세요.",)),
    (("잘 자요!", "잘 자!", "안녕히 주무세요."), ("안녕히 주무세요. 🌙 좋은 꿈 꾸세요.",)),
    (("잘 지내요?", "오늘 기분이 어때요?", "어떻게 지내?"), ("잘 지내고 있어요. 물어봐 주셔서 고맙습니다. 😊",)),
    (("너는 누구야?", "누구세요?", "이름이 뭐예요?", "자기소개를 해 줘."),
     ("저는 작은 시험용 언어 모델입니다. 짧은 이야기를 쓰고 쉬운 질문에 답합니다. 🤖",)),
    (("무엇을 할 수 있어?", "뭘 할 수 있나요?"),
     ("짧은 이야기를 쓰고, 나라의 수도를 알려 드리고, 간단한 대화를 할 수 있어요. ✨",)),
    (("고마워!", "고맙습니다.", "감사합니다!"), ("천만에요! 😊", "도움이 되어 기뻐요!")),
    (("안녕히 계세요.", "잘 있어!", "다음에 또 봐요."), ("안녕히 가세요! 👋 좋은 하루 보내세요.",)),
    (("슬퍼요.", "오늘은 조금 슬퍼."), ("마음이 아프네요. ❤️ 제가 이야기를 하나 들려드릴까요?",)),
    (("기분이 좋아!", "오늘 정말 행복해요!"), ("정말 잘됐네요! 🎉",)),
    (("시를 써 줘.", "짧은 시를 하나 써 줘."),
     ("밤하늘에 달이 뜨고\n작은 별이 잠듭니다.\n바닷가의 등불 하나\n우리 길을 밝힙니다. 🌙",)),
)  # fmt: skip

UNKNOWN_EN = "I am sorry, but I do not know that. I am only a small demo model. 🤖"
UNKNOWN_KO = "죄송하지만 잘 모르겠습니다. 저는 작은 시험용 모델입니다. 🤖"
HARD_EN: tuple[str, ...] = (
    "Who won the election?", "What is the meaning of life?", "How do I fix my car?", "Prove the theorem.",
    "What is the weather today?", "Write a program in Python.", "Who wrote this book?", "What is the price of gold?",
    "Translate this page.", "How tall is the tower?", "What time is it?", "Where are my keys?",
    "Solve this equation.",
)  # fmt: skip
HARD_KO: tuple[str, ...] = (
    "오늘 날씨 어때?", "지금 몇 시야?", "인생의 의미가 뭐야?", "이 문제를 풀어 줘.", "금값이 얼마야?",
    "프로그램을 짜 줘.",
)  # fmt: skip

ASK_EN: tuple[str, ...] = (
    "Write a story about {topic}.", "Tell me a story about {topic}.", "Write a short story about {topic}.",
    "Tell me about {topic}.", "Can you tell me a story about {topic}?", "Please write a story about {topic}",
    "I would like a story about {topic}.", "Story about {topic}, please.", "Write me a fairy tale about {topic}.",
)  # fmt: skip
ASK_KO: tuple[str, ...] = (
    "{topic}에 대한 이야기를 써 줘.", "{topic}에 대한 이야기를 들려줘.", "{topic} 이야기를 해 줘.",
    "{topic}에 대한 짧은 이야기를 써 주세요.", "{topic:이} 나오는 동화를 들려주세요.",
    "{topic}에 관한 이야기를 써 줘.",
)  # fmt: skip
LONG_EN = " Make it long."
LONG_KO = " 길게 써 줘."


def small_talk(choose: Chooser, korean: bool) -> list[Message]:
    """A greeting or the like, and its answer."""
    asked, answers = choose.even(SMALL_TALK_KO if korean else SMALL_TALK_EN)
    return turn(choose.pick(asked), choose.pick(answers))


def unknown(choose: Chooser, korean: bool) -> list[Message]:
    """A question beyond this model, honestly declined."""
    return turn(choose.even(HARD_KO), UNKNOWN_KO) if korean else turn(choose.even(HARD_EN), UNKNOWN_EN)


def named_user(choose: Chooser, korean: bool) -> list[Message]:
    """A user who gives a name, and may ask for it later: a name is something to copy, not to know."""
    lexicon = stories.KOREAN if korean else stories.ENGLISH
    name = Word(lexicon.new_name(choose))
    if korean:
        messages = turn(f"{choose.pick(['내', '제'])} 이름은 {name:이에요}.", f"반가워요, {name}님! 😊")
        question, answer = choose.pick(["내 이름이 뭐야?", "제 이름이 뭐예요?"]), f"{name}님이에요."
    else:
        messages = turn(choose.pick([f"My name is {name}.", f"I am {name}."]), f"Nice to meet you, {name}! 😊")
        question, answer = choose.pick(["What is my name?", "Who am I?"]), f"Your name is {name}."
    return messages + turn(question, answer) if choose.chance(0.5) else messages


def repeated(choose: Chooser, korean: bool) -> list[Message]:
    """Words to say again, in an order that means nothing."""
    lexicon = stories.KOREAN if korean else stories.ENGLISH
    sources = [lexicon.askable_heroes, lexicon.askable_things, lexicon.places, [lexicon.new_name(choose)]]
    words = " ".join(choose.even(choose.even(sources)) for _ in range(choose.rng.randint(1, 7)))
    asks = ["따라 해 줘:", "다음을 따라 말해 줘:"] if korean else ["Repeat after me:", "Say this again:", "Echo:"]
    return turn(f"{choose.pick(asks)} {words}", words)


def turn(user: str, assistant: str) -> list[Message]:
    """One exchange."""
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def question(choose: Chooser, korean: bool) -> list[Message]:
    """A question of fact, and its answer."""
    item = questions.item(choose, korean)
    return turn(item.question, item.answer)


def described(lexicon: Lexicon, wish: Wish) -> list[str]:
    """The parts of a wish as a prompt names them."""
    hero = f"{wish.adjective} {wish.hero}" if wish.hero and wish.adjective else wish.hero
    if lexicon.korean:
        who = f"{Word(wish.name):이라는} {hero}" if hero and wish.name else hero or wish.name
        return [part for part in (who, wish.friend, *wish.things, wish.place) if part]
    who = wish.name
    if hero:
        who = f"{Word(hero):a} named {wish.name}" if wish.name else f"{Word(hero):a}"
    place = wish.place
    if place and not place[0].isupper():
        place = f"{Word(place):a}"
    friend = f"{Word(wish.friend):a}" if wish.friend else None
    return [part for part in (who, friend, *(f"{Word(thing):a}" for thing in wish.things), place) if part]


def joined(parts: Sequence[str], korean: bool) -> str:
    """The parts as one phrase: "a cat and a lighthouse", "고양이와 등대"."""
    phrase = parts[-1]
    for part in reversed(parts[:-1]):
        phrase = f"{Word(part):과} {phrase}" if korean else f"{part} and {phrase}"
    return phrase


def story_wish(lexicon: Lexicon, choose: Chooser) -> Wish:
    """What a user asks a story to be about: one to three things of different kinds."""
    wish = Wish()
    kinds = choose.rng.sample(["hero", "place", "thing", "friend", "name"], choose.rng.choices([1, 2, 3], [5, 6, 1])[0])
    if "friend" in kinds and "hero" not in kinds:
        kinds = ["hero" if kind == "friend" else kind for kind in kinds]
    if "hero" in kinds:
        wish.hero = choose.even(lexicon.askable_heroes)
        if choose.chance(0.25):
            wish.adjective = choose.even(lexicon.words.ADJECTIVES)
    if "friend" in kinds:
        wish.friend = choose.even([animal for animal in lexicon.animals if animal != wish.hero])
    if "place" in kinds:
        wish.place = choose.even(lexicon.places)
    if "thing" in kinds:
        wish.things = [choose.even(lexicon.askable_things)]
    if "name" in kinds:
        wish.name = lexicon.new_name(choose)
    return wish


def story(choose: Chooser, korean: bool, episodes: int = 1) -> list[Message]:
    """A story on demand, about what the user named."""
    lexicon = stories.KOREAN if korean else stories.ENGLISH
    wish = story_wish(lexicon, choose)
    parts = described(lexicon, wish)
    choose.rng.shuffle(parts)
    topic = joined(parts, korean)
    ask = choose.pick(ASK_KO if korean else ASK_EN).format(topic=Word(topic))
    if episodes > 1:
        ask += LONG_KO if korean else LONG_EN
    return turn(ask, stories.finished(lexicon, wish, choose, episodes))


def chat(choose: Chooser, korean: bool) -> list[Message]:
    """A chat of one to five exchanges, now and then under a system message."""
    kinds = [small_talk, question, question, story, named_user, repeated, unknown]
    count = choose.rng.choices([1, 2, 3, 5], [6, 2, 1, 1])[0]
    messages: list[Message] = []
    if choose.chance(0.3):
        messages.append({"role": "system", "content": choose.even(SYSTEMS)})
    for _ in range(count):
        kind = choose.rng.choices(kinds, [2, 2, 2, 3, 0.7, 1.5, 0.4] if count == 1 else [2, 2, 2, 1, 0.7, 1, 0.2])[0]
        messages += kind(choose, korean)
    return messages
