"""English words for the stories, with an emoji where one fits."""

from __future__ import annotations

ANIMALS: dict[str, str] = {
    "fox": "🦊", "cat": "🐱", "dog": "🐶", "rabbit": "🐰", "bear": "🐻", "owl": "🦉", "mouse": "🐭", "hedgehog": "🦔",
    "turtle": "🐢", "squirrel": "🐿️", "otter": "🦦", "penguin": "🐧", "elephant": "🐘", "lion": "🦁", "tiger": "🐯",
    "duck": "🦆", "frog": "🐸", "deer": "🦌", "horse": "🐴", "goat": "🐐", "pig": "🐷", "cow": "🐮", "sheep": "🐑",
    "wolf": "🐺", "crow": "🐦", "whale": "🐳", "dolphin": "🐬", "crab": "🦀", "snail": "🐌", "bee": "🐝", "ant": "🐜",
    "butterfly": "🦋", "dragon": "🐉", "unicorn": "🦄", "monkey": "🐵", "panda": "🐼", "koala": "🐨", "beaver": "🦫",
    "badger": "🦡", "kitten": "🐱", "puppy": "🐶", "hen": "🐔", "swan": "🦢", "seal": "🦭", "octopus": "🐙",
}  # fmt: skip

PEOPLE: dict[str, str] = {
    "girl": "👧", "boy": "👦", "baker": "👨‍🍳", "sailor": "⚓", "farmer": "👩‍🌾", "painter": "👩‍🎨", "teacher": "👩‍🏫",
    "king": "👑", "queen": "👑", "princess": "👸", "prince": "🤴", "wizard": "🧙", "gardener": "🌱", "robot": "🤖",
    "giant": "🏔️", "pirate": "🏴‍☠️", "knight": "🛡️", "musician": "🎵", "doctor": "👩‍⚕️", "tailor": "🧵",
    "astronaut": "👩‍🚀", "engineer": "🔧", "programmer": "👩‍💻", "clockmaker": "🕰️", "mail carrier": "📮",
}  # fmt: skip

# Each place with the preposition for being there and an emoji.
PLACES: dict[str, tuple[str, str]] = {
    "lighthouse": ("in", "🌊"), "forest": ("in", "🌲"), "village": ("in", "🏡"), "castle": ("in", "🏰"),
    "island": ("on", "🏝️"), "mountain": ("on", "⛰️"), "river": ("by", "🏞️"), "lake": ("by", "💧"),
    "garden": ("in", "🌷"), "library": ("in", "📚"), "market": ("in", "🛒"), "bakery": ("in", "🥐"),
    "farm": ("on", "🚜"), "cave": ("in", "🪨"), "desert": ("in", "🏜️"), "beach": ("on", "🏖️"), "harbor": ("in", "⛵"),
    "school": ("in", "🏫"), "windmill": ("in", "🌾"), "bridge": ("under", "🌉"), "valley": ("in", "🌄"),
    "city": ("in", "🏙️"), "train station": ("in", "🚉"), "museum": ("in", "🏛️"), "meadow": ("in", "🌼"),
    "tower": ("in", "🗼"), "sea": ("by", "🌊"), "moon": ("on", "🌙"), "ship": ("on", "🚢"), "hill": ("on", "🌄"),
    "waterfall": ("by", "💦"), "jungle": ("in", "🌴"), "space station": ("on", "🛰️"), "palace": ("in", "🏯"),
    "tree": ("under", "🌳"), "Seoul": ("in", "🇰🇷"), "Paris": ("in", "🇫🇷"), "London": ("in", "🇬🇧"),
}  # fmt: skip

THINGS: dict[str, str] = {
    "lantern": "🏮", "kite": "🪁", "book": "📖", "map": "🗺️", "key": "🔑", "clock": "🕰️", "bell": "🔔", "boat": "⛵",
    "drum": "🥁", "violin": "🎻", "umbrella": "☂️", "blanket": "🧶", "star": "⭐", "apple": "🍎", "cake": "🎂",
    "hat": "🎩", "ring": "💍", "mirror": "🪞", "letter": "✉️", "box": "📦", "basket": "🧺", "seed": "🌱",
    "flower": "🌸", "stone": "🪨", "shell": "🐚", "feather": "🪶", "bicycle": "🚲", "ball": "⚽", "cup": "☕",
    "candle": "🕯️", "piano": "🎹", "telescope": "🔭", "compass": "🧭", "scarf": "🧣", "coin": "🪙", "balloon": "🎈",
    "computer": "💻", "pencil": "✏️", "guitar": "🎸", "teapot": "🫖", "crown": "👑",
}  # fmt: skip

# Words that only prompts bring up: the more there are, the better a story learns to take over what it is given.
MORE_HEROES: tuple[str, ...] = (
    "parrot", "camel", "zebra", "giraffe", "kangaroo", "lizard", "donkey", "goose", "mole", "bat", "moose", "lobster",
    "ghost", "fairy", "mermaid", "witch", "cook", "student", "nurse", "scientist", "shepherd", "grandmother",
    "grandfather", "lighthouse keeper", "train driver", "carpenter", "dancer", "singer", "poet", "miner", "hunter",
    "magician", "clown", "snowman", "scarecrow", "peacock", "eagle", "hamster", "salmon", "starfish", "ladybug",
    "cricket", "raven", "stork", "pigeon", "shark", "walrus", "yak", "llama", "raccoon",
)  # fmt: skip
MORE_THINGS: tuple[str, ...] = (
    "train", "rocket", "sandwich", "spoon", "pillow", "camera", "radio", "lamp", "puzzle", "doll", "whistle", "flute",
    "trumpet", "necklace", "button", "bottle", "bucket", "broom", "ladder", "wheel", "pumpkin", "carrot", "pear",
    "lemon", "cookie", "teddy bear", "music box", "paper plane", "snow globe", "treasure", "sword", "shield", "rope",
    "anchor", "brush", "painting", "postcard", "watch", "glove", "shoe", "sock", "coat", "chair", "pot", "jar",
    "magnet", "marble", "puppet", "robot toy", "sled",
)  # fmt: skip

NAMES: tuple[str, ...] = (
    "Mina", "Tom", "Lily", "Sam", "Mia", "Ben", "Nora", "Leo", "Anna", "Max", "Ruby", "Oscar", "Ella", "Finn", "Sora",
    "Hugo", "Luna", "Jack", "Ivy", "Otto", "Mary", "Theo", "Rosie", "Felix", "Clara", "Milo", "Poppy", "Jun", "Bella",
    "Arlo", "Hazel", "Gus", "Maya", "Pip", "Daisy", "Ned", "Emma", "Bruno", "Lucy", "Kim",
)  # fmt: skip

# The companions a story brings in by itself have names and kinds of their own, never those of a hero.
FRIEND_NAMES: tuple[str, ...] = ("Bobo", "Toby", "Wendy", "Archie", "Holly", "Rufus", "Penny", "Basil")
FRIENDS: tuple[str, ...] = ("sparrow", "weasel", "chipmunk", "robin", "pony", "toad", "lamb", "magpie", "gosling")

ADJECTIVES: tuple[str, ...] = (
    "small", "kind", "brave", "clever", "gentle", "quiet", "curious", "happy", "shy", "cheerful", "patient", "young",
    "little", "honest", "friendly",
)  # fmt: skip

THING_ADJECTIVES: tuple[str, ...] = ("red", "lovely", "blue", "shiny", "little", "green", "beautiful", "yellow")

WEATHER: tuple[str, ...] = ("sunny", "windy", "rainy", "cold", "snowy", "foggy", "warm", "bright")

FOODS: tuple[str, ...] = (
    "warm bread", "apple pie", "honey cakes", "vegetable soup", "sweet berries", "hot chocolate", "rice cakes",
    "pancakes", "cookies", "noodles",
)  # fmt: skip

LESSONS: tuple[str, ...] = (
    "a good friend is better than gold",
    "even a small light can guide the way",
    "being brave does not mean being without fear",
    "asking for help is not a weakness",
    "patience makes hard work easy",
    "kindness always comes back",
    "sharing makes every joy bigger",
    "every mistake can teach us something",
)

GOOD_ENDS: tuple[str, ...] = (
    "From that day on, {H} and {F} were the best of friends.",
    "And so {H} and {F} lived happily ever after.",
    "That night, {H} fell asleep with a smile.",
    "{H} had learned that {lesson}.",
    "After that, whenever the wind blew softly, {H} and {F} remembered that day and smiled.",
    "And to this day, {H} and {F} still tell that story to everyone who will listen.",
)
