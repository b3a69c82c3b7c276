"""English plots: each is a row of beats, and each beat a choice of sentences.

Slots: H and F are the names of hero and friend, `hero` and `friend` what they are, `at` the setting ("in the
forest"), `to` the goal ("to the sea"), `goal` its noun, `obj` and `gift` things; she/her/hem are the hero's pronouns.
"""

from __future__ import annotations

from typing import NamedTuple


class Plot(NamedTuple):
    """A plot: the optional slots its sentences use, its beats in order, and the things that do not suit it."""

    names: frozenset[str]
    beats: tuple[tuple[str, ...], ...]
    unfit: frozenset[str] = frozenset()


# A storm is no time to wave a piano, and an apple is not mended.
BULKY = frozenset({"piano", "boat", "bicycle", "computer", "cake", "tree"})
UNMENDABLE = frozenset({"apple", "cake", "seed", "flower", "star", "feather", "letter", "stone", "coin", "balloon"})


LOST = Plot(frozenset({"obj"}), (
    ("{H} had {thing_adj:a} {obj} that {she} loved more than anything.",
     "{Her} favorite thing in the whole world was {thing_adj:a} {obj}.",
     "Every day, {H} took good care of {her} {thing_adj} {obj}."),
    ("One {weather} morning, the {obj} was gone.",
     "But one {weather} day, {H} could not find the {obj} anywhere.",
     "Then, on {weather:a} evening, the {obj} disappeared."),
    ("{She} looked behind the door, under the table, and along the path, but it was not there.",
     "{She} searched all day long, from sunrise to sunset.",
     "{H} sat down on a step and began to cry."),
    ("Just then, {F} the {friend} came by. \"Why are you so sad?\" asked {F}.",
     "{F} the {friend} heard the noise and came to help.",
     "{H} went to {her} friend {F} the {friend} and asked for help."),
    ("\"My {obj} is lost,\" said {H}. \"Will you help me look for it?\"",
     "\"Do not worry,\" said {F}. \"We will find your {obj} together.\""),
    ("They followed a row of tiny footprints until they reached an old oak tree.",
     "Together they walked slowly and looked behind every stone.",
     "{F} climbed up high and looked around carefully."),
    ("There, among the leaves, lay the {obj}, as good as new.",
     "At last they saw something shine in the grass. It was the {obj}!",
     "A little bird had found the {obj} and was keeping it safe."),
    ("{H} laughed with joy and thanked {F} again and again.",
     "{H} was so happy that {she} danced in a circle.",
     "\"Thank you, {F}!\" said {H}. \"I could not have done it alone.\""),
))  # fmt: skip

STORM = Plot(frozenset({"obj"}), (
    ("One night, a great storm came.",
     "One evening, dark clouds covered the sky and the wind began to howl.",
     "Late one night, thunder rolled over the land."),
    ("{H} heard a voice calling for help far away.",
     "Through the rain, {H} heard somebody shouting.",
     "{She} looked out of the window and saw somebody walking in the dark."),
    ("It was {F} the {friend}, who had lost the way home.",
     "It was {F}, {friend_adj:a} {friend} who could not find the way."),
    ("{H} was afraid, but {she} took {her} {obj} and ran outside.",
     "{H} did not wait. {She} picked up {her} {thing_adj} {obj} and hurried out into the rain."),
    ("\"Come this way!\" {she} called as loudly as {she} could.",
     "\"Follow my voice!\" cried {H}.",
     "{She} waved the {obj} high above {her} head so that {F} could see it."),
    ("Step by step, {F} came closer, until they could hold hands.",
     "Soon {F} saw the {obj} and ran toward {H}."),
    ("They went inside, sat by the fire, and ate {food}.",
     "Inside it was warm, and {H} gave {F} a blanket and some {food}.",
     "They shared {food} and listened to the rain until it stopped."),
    ("In the morning, the sun came out and a rainbow stood over the hills.",
     "When the sun came up, the whole world looked clean and new."),
), BULKY)  # fmt: skip

BIRTHDAY = Plot(frozenset({"obj", "gift"}), (
    ("One day, {H} remembered that it was {F}'s birthday.",
     "The birthday of {F} the {friend} was coming soon.",
     "{H} had a good friend, {friend:a} named {F}, and tomorrow was {F}'s birthday."),
    ("{H} wanted to give {F} something special, but {she} had no money.",
     "\"What can I give to {F}?\" {H} asked {hem}self."),
    ("{She} thought about it for a long time, and then {she} had an idea.",
     "{H} walked up and down, thinking hard. Then {her} eyes began to shine."),
    ("{She} sold {her} {obj} and bought {thing_adj:a} {gift} for {F}.",
     "At the fair, {she} traded {her} {obj} for {thing_adj:a} {gift}.",
     "{She} carried {her} {obj} to the fair and came back with {thing_adj:a} {gift}."),
    ("The next day, everybody came to the party and ate {food}.",
     "At the party there were songs, games, and plenty of {food}."),
    ("When {F} opened the present and saw the {gift}, nobody said a word.",
     "{H} held out the {gift} with shaking hands."),
    ("Then {F} smiled. \"This {gift} is the most beautiful present I have ever had,\" said {F}.",
     "\"You made this {gift} for me?\" said {F}. \"I will keep it forever.\""),
    ("{H} felt warm and happy inside.", "Everybody clapped, and {H} turned red with joy."),
))  # fmt: skip

JOURNEY = Plot(frozenset({"goal", "obj"}), (
    ("Every night, {H} dreamed of {goal}.",
     "{H} had heard many tales about {goal}, and {she} wanted to see it with {her} own eyes.",
     "One {weather} morning, {H} decided to travel {to}."),
    ("{She} packed some {food} and {her} {obj} and set out at dawn.",
     "{She} put {her} {obj} in a bag, said goodbye, and began to walk."),
    ("On the way, {she} met {friend:a} named {F}. \"Where are you going?\" asked {F}.",
     "After a while, {she} came upon {friend_adj:a} {friend} named {F}, who was resting under a tree."),
    ("\"I am going {to},\" said {H}. \"Come with me!\"",
     "\"Let us go {to} together,\" said {H}, and {F} was glad to join."),
    ("They crossed a wide field, a deep wood, and a stream full of silver fish.",
     "The road was long and steep, but they sang songs and told jokes.",
     "When they were tired, they rested. When they were hungry, they shared some {food}."),
    ("Halfway there, they came to a wide river, and there was no bridge.",
     "On the third day, they lost their way in thick fog."),
    ("But {H} had {her} {obj}, and with it {she} found a safe way forward.",
     "{F} wanted to turn back, but {H} held up the {obj} and said, \"We can do it.\""),
    ("At last they stood before {goal}, and it was even more beautiful than in the dreams.",
     "Finally they reached {goal}, just as the first stars came out."),
    ("They stayed there for a long time without speaking.",
     "\"It was worth every step,\" said {H}."),
), BULKY)  # fmt: skip

CONTEST = Plot(frozenset({"obj"}), (
    ("Once a year, there was a great race, and the prize was {thing_adj:a} {obj}.",
     "One day, a big race was held, and the winner would get {thing_adj:a} {obj}."),
    ("{H} practiced every morning, even when it was cold.",
     "{H} was not the fastest, but {she} never gave up."),
    ("{F} the {friend} was the fastest of all and laughed at everybody.",
     "Everybody thought that {F} the {friend} would win."),
    ("When the bell rang, all of them began to run.",
     "The race began, and {F} was soon far ahead."),
    ("Halfway through, {F} fell into a muddy hole and could not get out.",
     "But near the end, {F} slipped on a wet stone and could not get up."),
    ("{H} could have won, but {she} stopped and helped {F} to stand up.",
     "{H} saw it, turned around, and pulled {F} out with all {her} strength."),
    ("They crossed the line side by side, and the crowd cheered.",
     "They finished last of all, yet everybody clapped for them."),
    ("\"You gave up the {obj} to help me,\" said {F}. \"Thank you.\"",
     "The judge gave the {obj} to {H}, because kindness matters more than speed."),
))  # fmt: skip

FEAR = Plot(frozenset({"obj"}), (
    ("{H} was afraid of only one thing, and that was the dark.",
     "{H} had a secret. {She} was afraid of the dark."),
    ("When the sun went down, {she} closed the door and hid under the bed.",
     "Every evening, {she} shut the windows and would not come out."),
    ("One day, {F} the {friend} came to visit and brought {thing_adj:a} {obj}.",
     "One evening, there was a knock at the door. It was {F} the {friend} with {thing_adj:a} {obj}."),
    ("\"Come outside with me,\" said {F}. \"I want to show you something.\"",
     "\"Take the {obj} and hold my hand,\" said {F}. \"You are not alone.\""),
    ("{H} took a deep breath and stepped out into the night.",
     "Slowly, {H} opened the door and took one small step, and then another."),
    ("Above them, a thousand stars were shining, and the moon was round and bright.",
     "The sky was full of stars, and fireflies danced over the grass."),
    ("\"I never knew that the night was so beautiful,\" whispered {H}.",
     "\"Look!\" said {H}. \"The night is not empty. It is full of light.\""),
    ("{F} gave the {obj} to {H}, and {she} was never afraid of the dark again.",
     "They sat beside the {obj} until morning, telling each other stories."),
), BULKY)  # fmt: skip

NEWCOMER = Plot(frozenset({"obj"}), (
    ("One day, a stranger arrived. It was {friend_adj:a} {friend} named {F}.",
     "One {weather} day, {friend:a} named {F} moved in next door."),
    ("Nobody spoke to {F}, and {F} always ate alone.",
     "The others only whispered and stayed away from {F}."),
    ("{H} saw that {F} was lonely, so {she} brought {food}.",
     "But {H} walked up to {F} and said, \"Hello! Would you like some {food}?\""),
    ("\"Thank you,\" said {F}. \"Nobody has been so kind to me before.\"",
     "{F} was surprised at first, but then {F} began to smile."),
    ("From a bag, {F} took {thing_adj:a} {obj} and showed it to {H}.",
     "In return, {F} showed {H} {thing_adj:a} {obj} from a faraway land."),
    ("They played with the {obj} all afternoon and forgot the time.",
     "{H} had never seen such {obj:a}, and {she} asked a hundred questions."),
    ("Soon the others came to see the {obj} too, and everybody sat together.",
     "The next day, {H} told everybody about {F}, and they all came to say hello."),
    ("Now {F} was not a stranger anymore.", "\"Welcome home, {F},\" said {H}."),
))  # fmt: skip

REPAIR = Plot(frozenset({"obj"}), (
    ("{H} owned {thing_adj:a} {obj} that had once belonged to {her} grandmother.",
     "On a shelf stood {thing_adj:a} {obj}, and {H} looked at it every day."),
    ("One day, the {obj} fell to the floor and broke.",
     "But one {weather} afternoon, {she} dropped the {obj}, and it broke into pieces."),
    ("{H} tried to fix it, but the more {she} tried, the worse it got.",
     "\"Oh no!\" cried {H}. \"I can never make it whole again.\""),
    ("So {she} carried the pieces to {F}, {friend_adj:a} {friend} who could fix almost anything.",
     "A neighbor told {hem} about {F} the {friend}, who was good at fixing things."),
    ("\"We can fix it,\" said {F}, \"but we must not hurry.\"",
     "{F} looked at the {obj} and nodded. \"It needs time and a steady hand.\""),
    ("Piece by piece, day after day, they put the {obj} together again.",
     "They worked for three days and stopped only to eat {food}."),
    ("When they were done, the {obj} was even more beautiful than before.",
     "On the last day, the {obj} looked like new, except for one thin golden line."),
    ("\"That line shows that somebody cared,\" said {F}.",
     "{H} hugged {F} and put the {obj} back in its place."),
), UNMENDABLE)  # fmt: skip

PLOTS: tuple[Plot, ...] = (LOST, STORM, JOURNEY, BIRTHDAY, CONTEST, FEAR, NEWCOMER, REPAIR)

OPENINGS: tuple[str, ...] = (
    "Once upon a time, {adj:a} {hero} named {H} lived {at}.",
    "Once upon a time, there was {adj:a} {hero} named {H} who lived {at}.",
    "Long ago, {adj:a} {hero} named {H} lived {at}.",
    "There was once {adj:a} {hero} named {H}, and {she} lived {at}.",
    "{At}, there lived {adj:a} {hero} named {H}.",
)

LINKS: tuple[str, ...] = (
    "Some time went by, and the seasons changed.",
    "But that was not the end of the story.",
    "A few weeks later, something new happened.",
    "Then came the spring, and with it a new adventure.",
)
