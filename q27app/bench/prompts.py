"""What is asked: the two prompts that the field compares by, filler of any length, agent transcripts. All of it seeded.

Filler begins with words of its seed, so two texts of different seeds differ from their first tokens on: nothing that a
server kept of one serves the other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

NARRATIVE = "Write a detailed 800-word essay explaining transformer attention."
CODE = "Write a Python implementation of quicksort with comments explaining each step."
CANONICAL = {"narrative": (NARRATIVE, 1000), "code": (CODE, 800)}
"""Name -> (prompt, most tokens of the answer)."""
CANONICAL_SAMPLER = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
GREEDY = {"temperature": 0.0}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}

_SUBJECTS = ("river", "harbour", "library", "garden", "engine", "bridge", "market", "orchard", "station", "workshop", "valley",
             "tower", "island", "kitchen", "theatre", "archive", "canal", "meadow", "factory", "museum")
_VERBS = ("keeps", "follows", "covers", "measures", "carries", "repairs", "describes", "collects", "divides", "connects",
          "opens", "supports", "reaches", "records", "replaces")
_QUALITIES = ("quiet", "narrow", "old", "bright", "steady", "distant", "heavy", "plain", "careful", "hidden", "early", "wide",
              "simple", "cold", "green")
_PLACES = ("in the morning", "behind the hill", "near the gate", "for many years", "after the rain", "along the wall",
           "without a sound", "before the winter", "under the roof", "beyond the road")


def filler(seed: int | str, num_chars: int) -> str:
    """Sentences of about `num_chars` characters, at least one; the same for the same arguments."""
    rng = random.Random(f"filler {seed}")
    mark = " ".join(rng.choice(_QUALITIES) + " " + rng.choice(_SUBJECTS) for _ in range(3))
    lines = [f"{mark.capitalize()} {rng.randrange(10**6)}."]
    size = len(lines[0])
    while size < num_chars:
        line = (f"The {rng.choice(_QUALITIES)} {rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} the {rng.choice(_QUALITIES)} "
                f"{rng.choice(_SUBJECTS)} {rng.choice(_PLACES)}.")
        lines.append(line)
        size += len(line) + 1
    return " ".join(lines)


def filler_message(seed: int | str, num_chars: int, question: str) -> list[dict[str, str]]:
    """A conversation of one long message."""
    return [{"role": "user", "content": f"{filler(seed, num_chars)}\n\n{question}"}]


@dataclass(frozen=True)
class Needle:
    """A fact in a haystack, and the question about it. answer: what a right answer holds."""

    fact: str
    question: str
    answer: str


def needle(seed: int | str) -> Needle:
    """A code of something, different for each seed."""
    rng = random.Random(f"needle {seed}")
    owner = f"{rng.choice(('box', 'door', 'team', 'project', 'item'))} {rng.randint(1, 999)}"
    code = "".join(rng.choice("0123456789") for _ in range(5))
    return Needle(f"Remember: the number of {owner} is {code}.", f"What is the number of {owner}?", code)


def haystack(seed: int | str, num_chars: int, depth: float, found: Needle) -> list[dict[str, str]]:
    """Filler with the needle between two sentences, at the share `depth` of the text (0 begin, 1 end), and the question."""
    sentences = filler(f"hay {seed}", num_chars).split(". ")
    place = min(len(sentences) - 1, max(1, round(depth * (len(sentences) - 1))))
    text = ". ".join(sentences[:place]) + ". " + found.fact + " " + ". ".join(sentences[place:])
    return [{"role": "user", "content": f"Read this text.\n\n{text}\n\n{found.question}"}]


# The transcript of an agent

_FILES = ("server", "parser", "cache", "client", "config", "router", "report", "queue", "worker", "schema", "index", "session")
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": text, "parameters": {
        "type": "object", "properties": {key: {"type": "string", "description": why} for key, why in fields.items()},
        "required": list(fields)}}}
    for name, text, fields in (
        ("read_file", "Reads a file of the project and returns its lines with numbers.", {"path": "File below the project's folder"}),
        ("write_file", "Replaces a file of the project.", {"path": "File below the project's folder", "content": "Its new text"}),
        ("run_tests", "Runs the tests and returns what failed.", {"folder": "Folder of tests"}),
        ("search", "Finds lines that hold a text.", {"text": "What to look for", "folder": "Where"}),
    ))


def agent_system(seed: int, num_rules: int = 60) -> str:
    """The rules that an agent's every request begins with."""
    rng = random.Random(f"rules {seed}")
    rules = (f"Rule {number}: when you change the {rng.choice(_FILES)}, keep the {rng.choice(_QUALITIES)} {rng.choice(_FILES)} "
             f"as it is and run the tests of the {rng.choice(_FILES)}." for number in range(1, num_rules + 1))
    return "You are a careful engineer who works in a project with tools.\n" + "\n".join(rules)


def tool_result(seed: int, turn: int, scale: float = 1.0) -> str:
    """What a tool returned in this turn: lines of a source file, of 20 to 90 lines at scale 1."""
    rng = random.Random(f"result {seed} {turn}")
    count = max(2, round(scale * rng.randint(20, 90)))
    name = rng.choice(_FILES)
    lines = (f"{number:>4}  {rng.choice(_FILES)}_{rng.randrange(100)} = {rng.choice(_FILES)}.{rng.choice(_VERBS)}"
             f"({rng.randrange(1000)}, {rng.choice(_QUALITIES)!r})" for number in range(1, count + 1))
    return f"src/{name}_{turn}.py\n" + "\n".join(lines)


def next_messages(seed: int, turn: int, said: dict[str, Any], scale: float = 1.0) -> list[dict[str, Any]]:
    """What follows an answer: its message as it came, then the results of its calls, or a result as the user's text."""
    calls = said.get("tool_calls") or []
    result = tool_result(seed, turn, scale)
    if calls:
        return [said, *({"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls)]
    return [said, {"role": "user", "content": f"Here is the next file.\n{result}\nWhat has to change in it?"}]
