"""Words, names and sentences that tasks are filled with; each list with its counterpart for the split "new"."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path

from curriculum.example import NEW

PEOPLE = """Anna Ben Clara David Emma Felix Greta Henry Ida Jonas Kate Leo Mia Noah Olga Paul Rosa Sam Tina Victor Wendy Yusuf
Zoe Adam Bella Carl Dora Erik Fiona George Helen Ivan Julia Karl Lena Max Nora Oscar Petra Robert Sara Tom Ursula Walter Alice
Bruno Celia Dennis Elsa Frank Gina Hugo Iris Jack Kim Lara Martin Nina Otto Rita Simon Vera""".split()
NEW_PEOPLE = "Amara Boris Chiara Dmitri Esme Farid Gwen Hassan Ingrid Jamal Keiko Lorenzo Mabel Nadia Omar Priya".split()
SURNAMES = """Smith Miller Brown Garcia Rossi Novak Weber Jensen Larsen Kowalski Silva Murphy Martin Dubois Keller Popov Tanaka
Chen Ahmed Cohen Moreau Costa Fischer Olsen Young King Wright Hill Green Baker""".split()
NEW_SURNAMES = "Okafor Lindqvist Petrov Haddad Yamamoto Ferreira Gallagher Schubert".split()
CITIES = """Oslo Paris Berlin Madrid Rome Vienna Prague Warsaw Lisbon Athens Dublin London Cairo Tokyo Lima Quito Boston Chicago
Denver Seattle Toronto Sydney Geneva Milan Turin Lyon Porto Bergen Hamburg Munich Zurich Helsinki Stockholm Copenhagen""".split()
NEW_CITIES = "Nairobi Osaka Tallinn Krakow Bogota Antwerp Leeds Malaga Perth Dakar".split()
THINGS = """lamp chair table book pen cup plate knife spoon clock mirror carpet pillow blanket bottle basket camera phone radio
printer keyboard monitor mouse cable battery torch tent rope ladder hammer drill saw bucket broom brush candle vase violin drum
guitar piano bicycle helmet jacket shirt scarf glove boot umbrella wallet ring watch ball kite puzzle""".split()
NEW_THINGS = "teapot compass lantern trumpet hammock skateboard telescope backpack whistle anvil".split()
COLORS = "red blue green yellow black white brown orange purple pink gray silver".split()
NEW_COLORS = "golden turquoise violet crimson".split()
ANIMALS = "cat dog horse cow sheep goat duck goose fox wolf bear deer rabbit mouse owl hawk crow frog snake lizard".split()
NEW_ANIMALS = "otter badger falcon heron lynx weasel".split()
FRUITS = "apple pear plum cherry lemon orange grape peach melon banana mango fig kiwi lime berry date".split()
NEW_FRUITS = "papaya apricot quince coconut".split()
MONTHS = "January February March April May June July August September October November December".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
WORDS = """able about above across act add after again age air all along also always among amount answer any area arm around arrive
art ask autumn away back bad bank base bath be bear beat bed begin behind bell below best better big bird bit block blood blow
board boat body bone both box boy branch bread break bridge bright bring brother build burn bus buy cake call calm can care carry
case catch cause chain chance change cheap child circle city class clean clear climb close cloth cloud coal coast coat cold come
common cook cool copy corn corner cost count country cover cross cry cup cut dance dark day deep desk door down draw dream dress
drink drive drop dry dust each ear earth east easy eat edge egg empty end engine enter even ever every eye face fact fall far farm
fast father feel field fight fill find fine finger fire first fish fit flat floor flow flower fly fold follow food foot force
forest form free fresh friend front fruit full game garden gate gift give glass go gold good grass great ground group grow half
hand hang hard hat head hear heart heat heavy help high hill hold hole home hope hot hour house hunt ice idea inside iron island
join judge jump keep key kind king kitchen know lake land large last late laugh law lead leaf learn leave left leg less letter
level lie life lift light like line list live lock long look lose loud love low machine make man map mark market mean meat meet
metal middle milk mind minute miss mix money moon more morning mother mountain mouth move music name near neck need never new
next night noise north nose note number ocean oil old open order other over page paint pair paper park part pass path pay people
picture piece place plain plan plant play point poor post power press price pull push quick quiet rain raise reach read ready
rest rich ride right ring rise river road rock roof room root rope round rule run safe sail salt sand save say school sea search
season seat second see seed sell send serve set shade shape share sharp ship shoe shop short show shut side sign silver simple
sing sister sit size skin sky sleep slow small smell smile smoke snow soft soil song soon sound south space speak speed spend
spring stage stand star start stay steam steel step stick still stone stop store storm story street strong study sugar summer
sun sweet swim tail take talk tall taste teach team tell test thick thin think throw time tool tooth top touch town track trade
train travel tree trip true try turn under use valley value view visit voice wait walk wall want war warm wash watch water wave
way wear weather week weight west wet wheel white wide wild wind window wing winter wire wise wish wood word work world write
year young""".split()
NEW_WORDS = """anchor barley cactus dagger ember feather glacier harbor ivory jungle kettle lagoon marble nectar oyster pepper quartz
ribbon saddle temple velvet walnut yonder zipper""".split()
PLACES = "the harbor|the station|the market|the library|the old mill|the garden|the bridge|the museum|the school|the bakery".split("|")
RESERVED = frozenset("""polish forward calibrate inspect summon freeze redeem harvest beacon greenhouse voucher orchard turbine passport
pipeline altitude nickname humidity quota destination brightness deadline region locker badge ticket phrase restaurant station guests
buffer weight cursor offset being""".split())
"""Words of the new split's tools and keys."""
REPO = Path(__file__).resolve().parents[2]


def pick(rng: random.Random, split: str, own: list[str], new: list[str]) -> str:
    return rng.choice(new if split == NEW else own)


def person(rng: random.Random, split: str) -> str:
    if split == "train" and rng.random() < 0.35:
        return invented(rng).capitalize()
    return pick(rng, split, PEOPLE, NEW_PEOPLE)


def full_name(rng: random.Random, split: str) -> str:
    surname = invented(rng).capitalize() if split == "train" and rng.random() < 0.35 else pick(rng, split, SURNAMES, NEW_SURNAMES)
    return f"{person(rng, split)} {surname}"


def city(rng: random.Random, split: str) -> str:
    if split == "train" and rng.random() < 0.35:
        return invented(rng).capitalize()
    return pick(rng, split, CITIES, NEW_CITIES)


def thing(rng: random.Random, split: str) -> str:
    if split == "train" and rng.random() < 0.35:
        return invented(rng)
    return pick(rng, split, THINGS, NEW_THINGS)


def word(rng: random.Random, split: str) -> str:
    """A common word, in training sometimes an invented one; in the new split half of them occur in no training text."""
    if split == NEW:
        return rng.choice(NEW_WORDS if rng.random() < 0.5 else WORDS)
    return invented(rng) if rng.random() < 0.3 else rng.choice(WORDS)


@cache
def reserved_words() -> frozenset[str]:
    """Every word of the split "new"."""
    lists = (NEW_PEOPLE, NEW_SURNAMES, NEW_CITIES, NEW_THINGS, NEW_COLORS, NEW_ANIMALS, NEW_FRUITS, NEW_WORDS)
    return frozenset(entry.lower() for entries in lists for entry in entries) | RESERVED


@cache
def real_words() -> tuple[str, ...]:
    """Some thousands of English words, from Python's language reference and this repository; none of the new split's."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        topics = {}
    text = " ".join([*topics.values(), *repository_lines()]).lower()
    return tuple(sorted(set(re.findall(r"[a-z]{3,12}", text)) - reserved_words()))


def invented(rng: random.Random) -> str:
    """A word that the task's lists do not hold, often one that means nothing: it must be read, it cannot be known."""
    kind = rng.random()
    if kind < 0.55:
        return rng.choice(real_words())
    if kind < 0.7:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8)))
    return "".join(rng.choice("bcdfghjklmnprstvwz") + rng.choice(("a", "e", "i", "o", "u", "ar", "en", "il", "on", "us"))
                   for _ in range(rng.randint(2, 4)))


def code(rng: random.Random, size: int | None = None) -> str:
    """A random string of capitals and digits."""
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789") for _ in range(size or rng.randint(4, 8)))


def sentence(rng: random.Random, split: str = "train") -> str:
    """A plain sentence of no importance."""
    who, where = person(rng, split), rng.choice(PLACES)
    kind = rng.randrange(14)
    if kind == 0:
        return f"{who} walked to {where} on {rng.choice(DAYS)} and bought a {rng.choice(COLORS)} {thing(rng, split)}."
    if kind == 1:
        return f"The {rng.choice(ANIMALS)} near {where} was {rng.choice(COLORS)} and very quiet."
    if kind == 2:
        return f"In {rng.choice(MONTHS)} it rained for {rng.randint(2, 29)} days in {city(rng, split)}."
    if kind == 3:
        return f"{who} and {person(rng, split)} met at {where} to talk about the {word(rng, split)} and the {word(rng, split)}."
    if kind == 4:
        return f"There were {rng.randint(2, 99)} {rng.choice(FRUITS)}s in the basket, and {who} counted them twice."
    if kind == 5:
        return f"The train from {city(rng, split)} to {city(rng, split)} was {rng.randint(2, 59)} minutes late."
    if kind == 6:
        return f"A {thing(rng, split)} costs {rng.randint(2, 99)} euros, but {who} paid only {rng.randint(2, 99)}."
    if kind == 7:
        return f"{who} wrote a long letter about {word(rng, split)}, {word(rng, split)} and {word(rng, split)}."
    if kind == 8:
        return f"Nobody at {where} knew why the {rng.choice(ANIMALS)} followed {who} home."
    if kind == 9:
        return f"The {word(rng, split)} was {rng.choice(('old', 'new', 'large', 'small', 'cold', 'warm'))}, so they left it at {where}."
    if kind == 10:
        return f"Every {rng.choice(DAYS)} {who} cleans the {thing(rng, split)} and reads {rng.randint(2, 40)} pages."
    if kind == 11:
        return f"It was {rng.randint(1, 12)} o'clock when {who} found the {rng.choice(COLORS)} {thing(rng, split)} behind {where}."
    if kind == 12:
        return f"Some people in {city(rng, split)} say that a {rng.choice(ANIMALS)} can smell {word(rng, split)}."
    return " ".join([word(rng, split).capitalize(), *(word(rng, split) for _ in range(rng.randint(3, 9)))]) + "."


@cache
def repository_lines() -> tuple[str, ...]:
    """Lines of this repository's own code and documents, in order."""
    files = [REPO / "README.md", *sorted((REPO / "q27app").rglob("*.py"))]
    return tuple(line for file in files for line in file.read_text(encoding="utf-8").splitlines())


def excerpt(rng: random.Random, num_lines: int) -> str:
    """Consecutive lines of the repository."""
    lines = repository_lines()
    start = rng.randrange(max(1, len(lines) - num_lines))
    return "\n".join(lines[start:start + num_lines]).strip("\n")


def paragraph(rng: random.Random, num_sentences: int, split: str = "train") -> str:
    return " ".join(sentence(rng, split) for _ in range(num_sentences))
