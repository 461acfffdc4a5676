"""The third held-out split, "blind": calls and recall in words that no shape of the curriculum was ever chosen by.

Tools, names, wordings and filler were written in one go, as a person would, before the curriculum was changed for the weights that
are scored on them; its shapes were chosen by what "held" and "new" got wrong, and no weights were scored here before that, nor any others
since (training/README.md has the scores). Single words may be among the random words of training, as a user's would. Nothing of this
module is used in training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from curriculum.example import Example, Step

PEOPLE = "Yolanda Gunther Priya Tobias Mireille Kwame Ingrid Salvatore Henrike Dmitri Rosalind Esteban Fatima Leopold".split()
PLACES = "Bremen Porto Tampere Lyon Cork Graz Bergamo Ghent Malaga Aarhus Krakow Basel".split()
ITEMS = "kettle ladder umbrella toaster drill blanket compass lantern stapler hammock rucksack teapot whistle anvil".split()
MATERIALS = "oak copper linen granite wool bamboo leather brass".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
CLUBS = "rowing chess pottery fencing astronomy baking".split()


def _code(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2)) + "-" + str(rng.randint(100, 9999))


VALUES = {
    "who": lambda rng: rng.choice(PEOPLE), "place": lambda rng: rng.choice(PLACES), "item": lambda rng: rng.choice(ITEMS),
    "material": lambda rng: rng.choice(MATERIALS), "weekday": lambda rng: rng.choice(WEEKDAYS), "club": lambda rng: rng.choice(CLUBS),
    "small": lambda rng: rng.randint(2, 12), "large": lambda rng: rng.randint(20, 4000), "flag": lambda rng: rng.random() < 0.5,
    "code": _code, "pair": lambda rng: f"{rng.choice(MATERIALS)} {rng.choice(ITEMS)}",
    "note": lambda rng: f"{rng.choice(ITEMS)} for {rng.choice(PEOPLE)}",
}
TYPES = {"small": "integer", "large": "integer", "flag": "boolean"}


@dataclass(frozen=True)
class Tool:
    """params: (name, kind) pairs. asks: requests with {param} in place of values."""

    name: str
    description: str
    params: tuple[tuple[str, str], ...]
    asks: tuple[str, ...]


TOOLS = (
    Tool("lend_item", "Lends something from the shed to a neighbour", (("item", "item"), ("borrower", "who")),
         ("Lend the {item} to {borrower}.", "{borrower} wants to borrow the {item}, please lend it.", "Can you lend out our {item}? The borrower is {borrower}.")),
    Tool("take_back_item", "Notes that a neighbour brought something back", (("item", "item"),),
         ("The {item} came back, note it.", "Please note that somebody brought back the {item}.", "Take the {item} back.")),
    Tool("water_plants", "Waters the plants of a balcony", (("balcony", "place"), ("litres", "small")),
         ("Water the plants on balcony {balcony} with {litres} litres.", "The plants of the balcony {balcony} are dry, give them {litres} litres of water.",
          "{litres} litres of water for the plants, balcony {balcony}.")),
    Tool("water_report", "Tells how much water a building used", (("building", "place"),),
         ("I need the water report of the building {building}.", "How much water did building {building} use? Make a report.", "Water report for {building}, please.")),
    Tool("ring_bell", "Rings the bell of a school", (("school", "place"), ("times", "small")),
         ("Ring the bell of the {school} school {times} times.", "At {school} the bell should ring {times} times.", "Please ring the school bell in {school}, {times} times.")),
    Tool("sharpenBlade", "Sharpens a blade in the workshop", (("blade", "pair"), ("angle", "small")),
         ("Sharpen the blade \"{blade}\" at an angle of {angle}.", "My blade \"{blade}\" is blunt. Sharpen it, angle {angle}.", "Sharpen \"{blade}\", the angle being {angle}.")),
    Tool("join_club", "Enters a member into a club", (("member", "who"), ("club", "club")),
         ("{member} would like to join the {club} club.", "Let {member} join the club for {club}.", "Please have {member} join: the club is {club}.")),
    Tool("leave_club", "Removes a member from a club", (("member", "who"), ("club", "club")),
         ("{member} wants to leave the {club} club.", "Remove {member} from the club for {club}; they leave.", "Let {member} leave the club {club}.")),
    Tool("weigh_parcel", "Weighs a parcel at the counter", (("parcel", "code"),),
         ("Weigh parcel {parcel}.", "What does the parcel {parcel} weigh?", "Put the parcel {parcel} on the scales and weigh it.")),
    Tool("stamp_letter", "Puts stamps on a letter", (("letter", "code"), ("stamps", "small")),
         ("Put {stamps} stamps on letter {letter}.", "The letter {letter} needs {stamps} stamps.", "Stamp the letter {letter} with {stamps} stamps.")),
    Tool("paint_fence", "Paints a fence", (("owner", "who"), ("coats", "small"), ("primer", "flag")),
         ("Paint the fence of {owner} with {coats} coats, primer set to {primer}.", "{owner}'s fence needs paint: coats {coats}, primer {primer}.",
          "Please paint the fence that belongs to {owner}; use {coats} coats and primer = {primer}.")),
    Tool("repair_fence", "Repairs a fence", (("owner", "who"), ("planks", "small")),
         ("Repair the fence of {owner} using {planks} planks.", "The fence of {owner} is broken, repair it with {planks} planks.", "{planks} planks should do to repair the fence of {owner}.")),
    Tool("reserve_court", "Reserves a tennis court", (("player", "who"), ("weekday", "weekday"), ("hours", "small")),
         ("Reserve a tennis court for {player} on {weekday} for {hours} hours.", "{player} would like a tennis court on {weekday}, {hours} hours.",
          "Tennis court, {weekday}, {hours} hours, player {player}.")),
    Tool("carve_sign", "Carves a wooden sign", (("text", "note"), ("wood", "material")),
         ("Carve a sign from {wood} that says \"{text}\".", "I would like a wooden sign with the text \"{text}\", the wood being {wood}.", "Carve \"{text}\" into a sign of {wood}.")),
    Tool("hang_poster", "Hangs a poster on a wall", (("poster", "note"), ("height", "large")),
         ("Hang the poster \"{poster}\" at a height of {height}.", "Poster \"{poster}\" goes on the wall, height {height}.", "Please hang up the poster called \"{poster}\", height as {height}.")),
    Tool("wash_windows", "Washes the windows of a floor", (("floor", "small"),),
         ("Wash the windows on floor {floor}.", "The windows of floor {floor} are dirty. Wash them.", "Could somebody wash the windows up on floor {floor}?")),
    Tool("wash_car", "Washes a car", (("plate", "code"), ("wax", "flag")),
         ("Wash the car with the plate {plate}, wax {wax}.", "My car {plate} is dirty, please wash it. Wax: {wax}.", "Car {plate} needs a wash with wax set to {wax}.")),
    Tool("drain_pool", "Drains a swimming pool", (("pool", "place"), ("minutes", "large")),
         ("Drain the {pool} pool for {minutes} minutes.", "Let the water out of the swimming pool {pool}: drain it for {minutes} minutes.", "The pool in {pool} must be drained, minutes {minutes}.")),
    Tool("feed_cat", "Feeds a cat", (("cat", "who"), ("grams", "large")),
         ("Feed the cat {cat} {grams} grams.", "My cat is called {cat} and is hungry, feed her {grams} grams.", "Give {grams} grams to the cat named {cat}.")),
    Tool("feed_goats", "Feeds all goats of a meadow", (("meadow", "place"), ("bales", "small")),
         ("Feed the goats on the {meadow} meadow {bales} bales.", "The goats of meadow {meadow} get {bales} bales today.", "{bales} bales for the goats, meadow {meadow}.")),
    Tool("print_badge", "Prints a name badge for a visitor", (("visitor", "who"), ("company", "place")),
         ("Print a badge for our visitor {visitor} from the company {company}.", "{visitor} needs a badge that names {company} as the company.",
          "Badge please: visitor {visitor}, company {company}.")),
    Tool("mix_concrete", "Mixes concrete", (("sacks", "small"), ("water", "large")),
         ("Mix concrete from {sacks} sacks with {water} of water.", "We need concrete: sacks {sacks}, water {water}.", "Make concrete out of {sacks} sacks, water being {water}.")),
    Tool("dim_lamp", "Dims a lamp", (("lamp", "pair"), ("percent", "small")),
         ("Dim the lamp \"{lamp}\" to {percent} percent.", "The lamp \"{lamp}\" is too bright, dim it to {percent} percent.", "Lamp \"{lamp}\" to {percent} percent, please dim it.")),
    Tool("order_bread", "Orders bread at the bakery", (("loaves", "small"), ("weekday", "weekday"), ("customer", "who")),
         ("Order {loaves} loaves of bread for {weekday}, the customer is {customer}.", "{loaves} loaves on {weekday}, please; order the bread in the name of the customer {customer}.",
          "Bread for {weekday}: loaves {loaves}, customer {customer}.")),
)
KINDS = {
    "locker code": _code, "seat": lambda rng: str(rng.randint(10, 999)), "licence": _code, "shoe size": lambda rng: str(rng.randint(30, 49)),
    "favourite material": lambda rng: rng.choice(MATERIALS), "home town": lambda rng: rng.choice(PLACES),
}
STATES = ("For the record: {o} has {v} as {k}.", "On the list it says that the {k} of {o} is {v}.", "When asked about the {k}, {o} wrote down {v}.",
          "The office confirmed that {o} was given the {k} {v}.", "And then there is {o}, whose {k} is {v}.")
QUESTIONS = ("Could you tell me what the {k} of {o} was?", "What did it say about {o}: which {k}?", "Somewhere it mentions the {k} of {o}. What is it?",
             "Quick question, what {k} did {o} have?", "Which {k} belongs to {o}?")
INTROS = ("Here are the minutes of our last meeting.\n\n", "I copied these notes from the village paper.\n\n", "Have a look through what follows, I will ask about it.\n\n")
STARTS = ("The committee", "Our neighbour", "A visitor from {p}", "The old baker", "Somebody near the {m} gate", "{w} and a friend", "The man with the {i}", "The bus driver")
DOINGS = ("talked for a while about the {i} that stood in the hall", "said that the road to {p} would be closed on {d}", "asked whether the roof could be mended with {m}",
          "had lost a {i} somewhere between the church and the station", "wanted to thank {w} for the soup", "was late because it had rained since {d}",
          "carried a {m} {i} all the way from {p}", "did not agree, but nobody minded", "told a long story about a {i} and a dog",
          "hoped that the {c} evening would take place on {d}")
ENDS = (".", ", as always.", ", and that was that.", ", which made people laugh.", " before lunch.", ". Nobody wrote down why.")
CHARS = 12_000
"""Of filler: prompts of about 4,096 tokens."""


def blind_call(rng: random.Random) -> Example:
    """One call with none to four other tools declared."""
    tool = rng.choice(TOOLS)
    given = {name: VALUES[kind](rng) for name, kind in tool.params}
    texts = {name: value if isinstance(value, str) else str(value).lower() for name, value in given.items()}
    tools = [tool, *rng.sample([other for other in TOOLS if other is not tool], rng.choice((0, 1, 2, 3, 4)))]
    rng.shuffle(tools)
    call = {"name": tool.name, "arguments": given}
    steps = Step("user", rng.choice(tool.asks).format(**texts)), Step("assistant", "", None, (call,))
    return Example("tool_calls", steps, {"kind": "calls", "calls": [call]}, tools=tuple(map(_declaration, tools)))


def _declaration(tool: Tool) -> dict[str, Any]:
    properties = {name: {"type": TYPES.get(kind, "string")} for name, kind in tool.params}
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": {
        "type": "object", "properties": properties, "required": list(properties)}}}


def _filler(rng: random.Random) -> str:
    text = rng.choice(STARTS) + " " + rng.choice(DOINGS) + rng.choice(ENDS)
    return text.format(p=rng.choice(PLACES), m=rng.choice(MATERIALS), i=rng.choice(ITEMS), w=rng.choice(PEOPLE), d=rng.choice(WEEKDAYS), c=rng.choice(CLUBS))


def blind_recall(rng: random.Random) -> Example:
    """Four to ten facts about people and things of one kind or several, in about CHARS characters; one question."""
    found: dict[tuple[str, str], str] = {}
    while len(found) < rng.randint(4, 10):
        owner = rng.choice(PEOPLE) if rng.random() < 0.6 else f"the {rng.choice(MATERIALS)} {rng.choice(ITEMS)}"
        kind = rng.choice(("locker code", "seat", "licence") if owner.startswith("the ") else tuple(KINDS))
        found[owner, kind] = KINDS[kind](rng)
    lines: list[str] = []
    while sum(map(len, lines)) < CHARS:
        lines.append(" ".join(_filler(rng) for _ in range(rng.randint(1, 4))))
    for (owner, kind), value in found.items():
        said = rng.choice(STATES).format(o=owner, k=kind, v=value)
        lines.insert(rng.randint(0, len(lines)), said[0].upper() + said[1:])
    owner, kind = rng.choice(list(found))
    asked = rng.choice(QUESTIONS).format(o=owner, k=kind)
    steps = Step("user", rng.choice(INTROS) + "\n".join(lines) + f"\n\n{asked}"), Step("assistant", f"The {kind} of {owner} is {found[owner, kind]}.")
    return Example("recall_4k", steps, {"kind": "contains", "values": [found[owner, kind]]}, alone=True)
