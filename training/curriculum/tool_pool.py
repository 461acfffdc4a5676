"""Tools: a dozen written by hand, any number made from word lists, and those that occur in no training example."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from curriculum.pools import COLORS, DAYS, city, code, invented, person, thing, word

Declaration = Mapping[str, Any]


@dataclass(frozen=True)
class Written:
    """A tool written by hand. asks: requests with {parameter} in place of values; result keys come from `returns`."""

    name: str
    description: str
    params: tuple[tuple[str, str], ...]
    asks: tuple[str, ...]
    returns: tuple[tuple[str, str], ...]
    says: str


WRITTEN = (
    Written("get_weather", "Current weather of a city", (("city", "city"),),
            ("What is the weather in {city}?", "How is the weather in {city} today?", "Is it warm in {city}?", "Weather for {city}, please."),
            (("temperature", "degrees"), ("sky", "sky")), "It is {temperature} degrees and {sky} in {city}."),
    Written("add_event", "Puts an event into the calendar", (("title", "thing"), ("day", "day"), ("hour", "hour")),
            ("Put the {title} on {day} at {hour} into my calendar.", "Add an event: {title}, {day}, {hour} o'clock.",
             "Schedule the {title} for {day} at {hour}."), (("id", "number"),), "The {title} is in your calendar on {day} at {hour}."),
    Written("send_mail", "Sends an e-mail", (("to", "mail"), ("subject", "words"), ("body", "sentence")),
            ("Send a mail to {to} with the subject \"{subject}\" that says: {body}", "Mail {to}: subject {subject}, text \"{body}\""),
            (("status", "done"),), "The mail to {to} is sent."),
    Written("search_web", "Searches the web", (("query", "words"),),
            ("Search the web for {query}.", "Look up {query} on the web.", "Find pages about {query}."),
            (("top", "sentence"),), "I found this: {top}"),
    Written("read_file", "Reads a text file", (("path", "path"),),
            ("Read the file {path}.", "What is in {path}?", "Show me {path}.", "Open {path} and tell me what it says."),
            (("content", "sentence"),), "The file {path} says: {content}"),
    Written("write_file", "Writes text to a file", (("path", "path"), ("content", "sentence")),
            ("Write \"{content}\" to {path}.", "Create {path} with this text: {content}", "Save the text \"{content}\" as {path}."),
            (("bytes", "number"),), "I wrote {bytes} bytes to {path}."),
    Written("run_command", "Runs a shell command", (("command", "command"),),
            ("Run {command}.", "Execute the command `{command}`.", "Please run `{command}` for me."),
            (("output", "words"),), "The command printed: {output}"),
    Written("convert_money", "Converts an amount of money", (("amount", "number"), ("source", "currency"), ("target", "currency")),
            ("How much is {amount} {source} in {target}?", "Convert {amount} {source} to {target}."),
            (("result", "number"),), "{amount} {source} are {result} {target}."),
    Written("set_timer", "Starts a timer", (("minutes", "number"),),
            ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Start a timer of {minutes} minutes."),
            (("id", "number"),), "The timer is set to {minutes} minutes."),
    Written("find_person", "Finds a person in the address book", (("name", "person"),),
            ("Find {name} in my address book.", "What is the phone number of {name}?", "Look up {name}."),
            (("phone", "phone"),), "The phone number of {name} is {phone}."),
    Written("turn_light", "Switches a light", (("room", "room"), ("on", "flag")),
            ("Switch the light in the {room}: on is {on}.", "Set the light of the {room} to {on}."),
            (("status", "done"),), "The light in the {room} is set."),
    Written("play_music", "Plays music", (("style", "style"), ("volume", "number")),
            ("Play {style} music at volume {volume}.", "Put on some {style}, volume {volume}."),
            (("song", "words"),), "I am playing {song}."),
)
NEW_WRITTEN = (
    Written("book_table", "Books a table in a restaurant", (("restaurant", "new_word"), ("guests", "number"), ("evening", "day")),
            ("Book a table at {restaurant} for {guests} guests on {evening}.", "Reserve at {restaurant}: {guests} guests, {evening}."),
            (("confirmation", "code"),), "The confirmation is {confirmation}."),
    Written("measure_humidity", "Measures how humid a place is", (("station", "city"),),
            ("How humid is it at {station}?", "Measure the humidity at {station}."), (("percent", "degrees"),), "The percent is {percent}."),
    Written("translate_phrase", "Translates a phrase", (("phrase", "words"), ("language", "language")),
            ("Translate \"{phrase}\" into {language}.", "What is \"{phrase}\" in {language}?"), (("translation", "words"),),
            "The translation is {translation}."),
    Written("lock_door", "Locks a door", (("door", "room"), ("locked", "flag")),
            ("Set the lock of the {door} door: locked is {locked}.",), (("status", "done"),), "The status is {status}."),
)
VERBS = """get list create delete update find check count start stop open close move copy sort merge split export import load save reset
show hide lock test build deploy scan clean resize rotate rename archive restore print sync pause resume watch assign cancel approve
reject fetch query submit track measure order book pay""".split()
NEW_VERBS = "polish forward calibrate inspect summon freeze redeem harvest".split()
NOUNS = """account order invoice user file folder photo video song playlist note task project report table row column chart page
message thread channel server backup image container branch commit ticket event room device sensor camera engine route map city
package parcel shipment product price stock coupon contract lesson course exam recipe meal flight hotel ticket car bike train
budget payment card bank loan market graph model dataset job queue worker log alert rule filter label tag group team member
customer supplier warehouse""".split()
NEW_NOUNS = "beacon greenhouse voucher telescope orchard turbine passport pipeline".split()
PARAMS = """name id title city limit offset size color status kind owner date day hour count level mode path url query text note
reason start end width height speed weight price amount currency language format priority label group user target source message
subject address country zone version depth timeout retries key value code""".split()
NEW_PARAMS = "altitude nickname humidity quota destination brightness deadline region".split()
KINDS = ("word", "words", "number", "flag", "code", "city", "person", "color")


def make_value(rng: random.Random, kind: str, split: str) -> Any:
    """A value of one of the kinds that declarations use."""
    plain = {
        "city": city, "person": person, "thing": thing, "word": word,
    }
    if kind in plain:
        return plain[kind](rng, split)
    if kind == "new_word":
        return word(rng, split).capitalize()
    if kind == "words":
        return " ".join(word(rng, split) for _ in range(rng.randint(2, 4)))
    if kind == "sentence":
        return " ".join([word(rng, split).capitalize(), *(word(rng, split) for _ in range(rng.randint(2, 7)))]) + "."
    if kind in ("number", "degrees", "hour"):
        return rng.randint(*{"number": (1, 999), "degrees": (2, 39), "hour": (7, 21)}[kind])
    if kind == "flag":
        return rng.random() < 0.5
    if kind == "code":
        return code(rng, rng.randint(4, 8))
    if kind == "phone":
        return "".join(rng.choice("0123456789") for _ in range(7))
    if kind == "mail":
        return f"{person(rng, split).lower()}@example.com"
    if kind == "path":
        return f"{rng.choice(('', '/tmp/', 'docs/', 'src/', '/home/user/'))}{word(rng, split)}.{rng.choice(('txt', 'md', 'py', 'json', 'csv'))}"
    if kind == "command":
        return rng.choice((f"ls {word(rng, split)}", f"cat {word(rng, split)}.txt", f"python {word(rng, split)}.py", "git status",
                           f"mkdir {word(rng, split)}", f"grep {word(rng, split)} {word(rng, split)}.log", "q27app list"))
    choices = {"day": DAYS, "color": COLORS, "sky": ("sunny", "cloudy", "rainy", "windy", "clear"), "done": ("done", "ok"),
               "currency": ("EUR", "USD", "GBP", "NOK", "JPY"), "room": ("kitchen", "office", "hall", "garage", "bedroom"),
               "style": ("jazz", "rock", "folk", "classical", "dance"), "language": ("French", "Spanish", "German", "Italian")}
    return rng.choice(choices[kind])


def json_type(kind: str) -> str:
    return {"number": "integer", "degrees": "integer", "hour": "integer", "flag": "boolean"}.get(kind, "string")


def declare(name: str, description: str, params: tuple[tuple[str, str], ...], required: int | None = None) -> Declaration:
    """OpenAI's form; the first `required` parameters must be given, None = all."""
    properties = {key: {"type": json_type(kind)} for key, kind in params}
    must = [key for key, _ in params[:required]]
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {
        "type": "object", "properties": properties, "required": must}}}


def made_name(rng: random.Random, split: str) -> tuple[str, str, str]:
    """(name, verb, noun) of a made tool."""
    verb = rng.choice(NEW_VERBS if split == "new" else VERBS)
    noun = rng.choice(NEW_NOUNS if split == "new" else NOUNS)
    if split == "train" and rng.random() < 0.5:
        verb, noun = rng.choice(((verb, invented(rng)), (invented(rng), noun), (invented(rng), invented(rng))))
    style = rng.random()
    name = f"{verb}_{noun}" if style < 0.7 else f"{noun}_{verb}" if style < 0.8 else f"{verb}{noun.capitalize()}" if style < 0.93 else verb
    return name, verb, noun


def shown(value: Any) -> str:
    """A value as a request says it."""
    return value if isinstance(value, str) else json.dumps(value)
