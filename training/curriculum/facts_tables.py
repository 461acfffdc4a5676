"""What q27app's tables say, as facts: commands, settings, exit codes, flags, tiers. Values are read from the program."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from curriculum.facts_general import Fact

COMMANDS = {
    "serve": ("serves a model over HTTP until stopped", ("serve a model over HTTP", "start the daemon", "start the server")),
    "demo": ("asks the bundled model something, to see that everything works", ("ask the bundled model", "see the demo")),
    "generate": ("continues a prompt once, without a daemon", ("continue a prompt once", "generate text without a daemon")),
    "tokens": ("turns text into token ids and back", ("turn text into token ids", "see the token ids of a text")),
    "convert": ("converts a Hugging Face folder or a GGUF file to .q27", ("convert a checkpoint to .q27", "convert a GGUF file")),
    "inspect": ("shows what a .q27 file holds", ("see what a .q27 file holds", "look into a .q27 file")),
    "synth": ("writes a constructed checkpoint for tests and measurements", ("write a constructed checkpoint", "make a checkpoint for tests")),
    "list": ("lists the models that can be named", ("list the models", "see which models I have")),
    "config": ("shows the configuration and where each value comes from", ("show the configuration", "see the configuration")),
    "version": ("prints versions", ("print the version", "see which version I have")),
}
SETTINGS = {
    "server.host": "the address to listen on", "server.port": "the TCP port of the daemon",
    "server.api_key_file": "a file with one API key a line", "server.body_limit_mb": "the largest request body in MiB",
    "server.ping_interval_s": "the seconds of silence after which a stream sends a ping",
    "server.max_queue": "how many requests may wait", "server.drain_timeout_s": "the seconds that running answers get to finish",
    "server.allow_open_bind": "listening on a non-loopback address without any key",
    "model.path": "the model that is served", "model.template": "how a conversation becomes a prompt",
    "model.backend": "where to compute", "model.context": "the window of a conversation in tokens",
    "model.slots": "how many requests run at the same time", "model.kv": "the format of the attention cache",
    "model.draft": "where drafts come from", "model.max_draft": "the most drafts in one pass", "engine.prefill_chunk": "the prompt tokens computed between two decode steps",
    "sampling.temperature": "how random the answers are", "sampling.top_k": "how many of the most likely tokens are kept",
    "sampling.top_p": "the probability that the kept tokens have together", "sampling.min_p": "how likely a kept token is at least",
    "sampling.max_tokens": "the longest answer in tokens", "reasoning.default": "whether the model thinks when a request does not say",
    "reasoning.effort": "how long the model thinks", "reasoning.budget": "the most reasoning tokens",
    "log.format": "whether the log is text or JSON", "log.level": "the least severe event that is logged",
}
EXIT_CODES = {
    0: ("success", "it succeeds"), 1: ("that the operation failed for a reason named in the message", "the operation failed"),
    2: ("wrong usage or configuration", "the usage or configuration is wrong"),
    3: ("that a model, tokenizer or cache file is damaged", "a file is damaged"),
    4: ("that the GPU, its driver or its toolkit cannot be used", "the GPU cannot be used"),
    5: ("that the model does not fit into memory", "the model does not fit into memory"),
    6: ("that the address is in use or cannot be bound", "the address is in use"),
    7: ("that the daemon is not reachable", "the daemon is not reachable"),
    70: ("an internal error", "there is an internal error"), 75: ("that the engine died", "the engine died"),
    130: ("that it was interrupted", "it was interrupted"),
}
FLAGS = {
    "--model": ("names the model: a path, a name in the models folder, or demo", "name the model"),
    "--port": ("sets the TCP port", "set the TCP port"), "--host": ("sets the address to listen on", "set the listening address"),
    "--ctx": ("sets the window in tokens", "set the window"), "--tier": ("chooses the tier of a conversion", "choose a tier"),
    "--backend": ("says where to compute: auto, cuda or numpy", "choose the backend"),
    "--mtp": ("names a GGUF file with the draft layer", "name the file with the draft layer"),
    "--overwrite": ("replaces the destination if it exists", "replace an existing file"),
    "--json": ("prints the result as JSON", "get the result as JSON"),
}


def _default(key: str) -> Any:
    from q27app.config import SECTIONS

    section, name = key.split(".")
    return next(item.default for item in fields(SECTIONS[section]) if item.name == name)


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "empty" if value == "" else f"{value:g}" if isinstance(value, float) else str(value)


def _command(name: str, does: str, goals: tuple[str, ...]) -> list[Fact]:
    answer = f"q27app {name} {does}."
    key = does.split(",")[0]
    first = (answer, (key,), (
        f"What does q27app {name} do?", f"What is q27app {name}?", f"Explain q27app {name}.", f"What is the command {name} for?",
        f"What happens when I run q27app {name}?", f"Why would I run q27app {name}?", f"The purpose of q27app {name}?", f"q27app {name}: what for?",
        f"What can I do with q27app {name}?", f"Someone told me to run q27app {name}. What will it do?", f"I do not know the command {name}.",
        f"q27app {name}?", f"What does the command {name} do?", f"When do I use q27app {name}?", f"Tell me about q27app {name}."),
        (f"Please describe the command q27app {name}.", f"I see a command called {name}. What is it for?"))
    asked = tuple(form.format(g=goal) for goal in goals for form in (
        "Which command do I use to {g}?", "How do I {g}?", "What is the command to {g}?", "I want to {g}.", "How can I {g}?",
        "Is there a command to {g}?", "I would like to {g}.", "Show me how to {g}.", "Which command lets me {g}?", "To {g}, which command?", "The command to {g}?",
        "My goal is to {g}.", "With what do I {g}?", "I am trying to {g}.", "What do I run to {g}?", "How does one {g}?", "I have to {g}. How?"))
    new = tuple(form.format(g=goal) for goal in goals for form in ("Name the command with which I {g}.", "What should I type to {g}?"))
    return [first, (f"Use q27app {name}.", (f"q27app {name}",), asked, new)]


def _setting(key: str, meaning: str) -> list[Fact]:
    value = _said(_default(key))
    section, name = key.split(".")
    variable = f"Q27APP_{section.upper()}__{name.upper()}"
    return [
        (f"{key} is {meaning}.", (meaning,), (
            f"What is {key}?", f"What does {key} mean?", f"What is the setting {key} for?", f"Explain {key}.", f"What does {key} set?",
            f"Tell me about the setting {key}.", f"What is the purpose of {key}?", f"What does the setting {key} control?", f"Why is there {key}?",
            f"I do not understand {key}.", f"{key}?", f"Meaning of {key}?", f"What do I change with {key}?", f"What is {key} good for?"), (f"Please describe the setting {key}.", f"In config.toml I see {key}. What is it?")),
        (f"The default of {key} is {value}.", (f"is {value}",), (
            f"What is the default of {key}?", f"Which default does {key} have?", f"What value does {key} have by default?",
            f"Default of {key}?", f"Tell me the default value of {key}.", f"What is {key} when nothing is configured?", f"Which value does {key} start with?",
            f"The standard value of {key}?", f"Without configuration, what does {key} hold?", f"{key}: default?", f"What is {key} set to at first?",
            f"What does q27app take for {key} when I leave it out?", f"Preset of {key}?", f"I have not touched {key}. What is its value?"),
            (f"If I do not set {key}, which value is used?", f"By default, what is {key}?")),
        (f"{meaning[0].upper()}{meaning[1:]} is set by {key}.", (key,), (
            f"Which setting sets {meaning}?", f"Which key of config.toml is {meaning}?", f"How do I set {meaning}?",
            f"Where do I configure {meaning}?", f"How do I change {meaning}?", f"Which setting is for {meaning}?", f"What do I set for {meaning}?",
            f"I want to set {meaning}.", f"Setting for {meaning}?", f"With which key can I choose {meaning}?", f"What is {meaning} called in config.toml?"), (f"What is the name of the setting for {meaning}?", f"I need to change {meaning}. How?")),
        (f"The variable is {variable}.", (variable,), (
            f"Which environment variable sets {key}?", f"What is the environment variable for {key}?", f"How do I set {key} in the environment?",
            f"Environment variable for {key}?", f"Which variable is for {key}?", f"{key} as an environment variable?", f"What do I export to set {key}?",
            f"The variable of {key}?", f"Give the environment variable that stands for {key}."),
            (f"Name the environment variable of {key}.",)),
    ]


def _exit_code(code: int, meaning: str, when: str) -> list[Fact]:
    return [
        (f"Exit code {code} means {meaning}.", (meaning.removeprefix("that "),), (
            f"What does exit code {code} mean?", f"What is exit code {code}?", f"q27app ended with exit code {code}. Why?",
            f"Explain exit code {code}.", f"The exit code is {code}. What does that mean?", f"Exit code {code}?",
            f"Why do I see exit code {code}?", f"It stopped with exit code {code}.", f"Exit status {code}, what now?", f"What is the reason for exit code {code}?",
            f"A command returned {code}. Why?", f"Which problem has exit code {code}?", f"q27app exits with {code}. What is the matter?"),
            (f"Tell me the meaning of exit code {code}.", f"My script got exit code {code} from q27app. What happened?")),
        (f"The exit code is {code}.", (f"is {code}.",), (
            f"What is the exit code if {when}?", f"Which exit code means that {when}?", f"Which exit code does q27app have when {when}?",
            f"With which code does q27app exit if {when}?", f"When {when}, what is the exit code?", f"If {when}, which code is returned?", f"Exit code for: {when}",
            f"What number do I see when {when}?", f"The exit code when {when}?"),
            (f"Suppose {when}: which exit code do I get?",)),
    ]


def _flag(flag: str, does: str, goal: str) -> list[Fact]:
    return [
        (f"{flag} {does}.", (does.split(":")[0],), (
            f"What does {flag} do?", f"What is the flag {flag} for?", f"Explain {flag}.", f"What does the option {flag} mean?",
            f"{flag}?", f"Why would I use {flag}?", f"What is {flag} good for?", f"What changes with the flag {flag}?", f"Meaning of {flag}?",
            f"Tell me about {flag}.", f"When do I need {flag}?", f"I saw {flag} in a command. What is it?"),
            (f"Please describe the option {flag}.", f"What happens with {flag}?")),
        (f"Use {flag}.", (flag,), (f"Which flag do I use to {goal}?", f"Which option lets me {goal}?", f"With which flag do I {goal}?",
            f"What flag is there to {goal}?", f"How do I {goal} on the command line?", f"I want to {goal}. Which option?", f"Flag to {goal}?",
            f"Which argument is used to {goal}?", f"Can a flag {goal}?", f"On the command line, how can I {goal}?"),
            (f"Is there an option to {goal}?",)),
    ]


def table_facts() -> list[Fact]:
    """All facts of the tables."""
    found: list[Fact] = []
    for name, (does, goals) in COMMANDS.items():
        found += _command(name, does, goals)
    for key, meaning in SETTINGS.items():
        found += _setting(key, meaning)
    for code, (meaning, when) in EXIT_CODES.items():
        found += _exit_code(code, meaning, when)
    for flag, (does, goal) in FLAGS.items():
        found += _flag(flag, does, goal)
    return found
