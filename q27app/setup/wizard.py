"""The set-up dialogue as a pure state machine: what is asked next, which answers there are and why, what they make.

    begin(facts, given)        given: answers that flags gave; those steps are not asked
    question(wizard)           what to ask now; None once it is done or was left
    answered(wizard, value)    the next state; raises UsageError, and nothing has changed
    back(wizard)               to the step before, which is asked again with its answer as default
    worked, failed             what came of the work that an answer asked for (`wizard.work`)
    outcome(wizard)            settings and deeds: shown in the review, carried out once at the end (`finish`)

Answers are short texts, so that prompts, flags and a screen share them. Steps, in order; one that does not apply is skipped:

    checks    what the doctor found           slots     requests at once
    card      which card, by UUID             fetch     download, import or later      work: brings the file
    model     which checkpoint or file        trial     a load test                    work: measures
    tier      its size and quality            idle      give the card back when unused
    kv        format of the cache             service   systemd
    context   the window                      access    who may ask; clients; review
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from q27app.errors import Q27Error, UsageError
from q27app.setup.checkpoints import FAMILY, Checkpoint
from q27app.setup.facts import Facts
from q27app.setup.plan import Machine, Plan, Wishes, make_plan

STEPS = ("checks", "card", "model", "tier", "kv", "context", "slots", "fetch", "trial", "idle", "service", "access", "clients",
         "review")
CPU, DEMO, AUTO, LATER = "cpu", "demo", "auto", "later"
MAX_ANSWER = 4096
"""Characters; a longer answer is refused unread."""
OPEN_HOST = "0.0.0.0"


@dataclass(frozen=True)
class Option:
    """One answer. is_possible: False shows it with the reason why it cannot be chosen."""

    value: str
    label: str
    reason: str = ""
    is_possible: bool = True


@dataclass(frozen=True)
class Question:
    """takes: what may be typed beside the options, in words, or "". budget: (what, bytes) of the configuration so far, the last
    row what is left; () where there is none yet."""

    step: str
    title: str
    options: tuple[Option, ...]
    default: str
    text: tuple[str, ...] = ()
    takes: str = ""
    budget: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Trial:
    """What a load test measured. used: bytes of the card that the process took, None if the driver does not tell."""

    tokens_per_s: float
    load_s: float
    used: int | None = None


@dataclass(frozen=True)
class Wizard:
    """One moment of the dialogue. step: what is asked, "done" or "left". work: what must be carried out before the next step is
    asked ("download OWNER/REPO:FILE", "import PATH", "trial"), or "". trouble: why the last work did not succeed."""

    facts: Facts
    step: str = "checks"
    answers: Mapping[str, str] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    work: str = ""
    fetched: Checkpoint | None = None
    """The file that `fetch` brought."""
    trial: Trial | None = None
    trouble: str = ""


@dataclass(frozen=True)
class Outcome:
    """What the answers make. settings: "section.key" -> value to write. service: "", "install" or "linger"."""

    settings: dict[str, Any]
    makes_key: bool = False
    service: str = ""
    shows_clients: bool = False


def begin(facts: Facts, given: Mapping[str, str] | None = None) -> Wizard:
    """The first state. Raises UsageError for a given answer that is of no step; whether it can be is seen when it is its turn."""
    answers = {step: value for step, value in (given or {}).items() if value is not None}
    unknown = sorted(set(answers) - set(STEPS))
    if unknown:
        raise UsageError(f"there is no step {unknown[0]!r} in the set-up.", f"Steps: {', '.join(STEPS)}.")
    return _settled(Wizard(facts, STEPS[0], answers, frozenset(answers)))


def question(wizard: Wizard) -> Question | None:
    """What is to be asked now."""
    from q27app.setup.questions import ask

    return None if wizard.step in ("done", "left") or wizard.work else ask(wizard)


def answered(wizard: Wizard, value: str) -> Wizard:
    """The state after this answer. Raises UsageError naming what can be answered."""
    assert not wizard.work and wizard.step in STEPS, (wizard.step, wizard.work)
    checked = _checked(wizard, value)
    answers = {**wizard.answers, wizard.step: checked}
    wizard = replace(wizard, answers=answers, trouble="")
    if wizard.step == "checks" and checked == "leave" or wizard.step == "review" and checked == "leave":
        return replace(wizard, step="left")
    if wizard.step in ("card", "model", "tier", "kv", "context", "slots", "fetch"):
        wizard = replace(wizard, trial=None, fetched=None if wizard.step in ("model", "tier") else wizard.fetched)
    work = _work(wizard)
    return replace(wizard, work=work) if work else _settled(_moved(wizard, 1))


def back(wizard: Wizard) -> Wizard:
    """One step back, over those that flags answered; at the first one nothing happens."""
    if wizard.work:
        return replace(wizard, work="")
    index = STEPS.index(wizard.step) - 1
    while index >= 0 and not (applies(wizard, STEPS[index]) and STEPS[index] not in wizard.given):
        index -= 1
    return wizard if index < 0 else replace(wizard, step=STEPS[index], trouble="")


def worked(wizard: Wizard, result: Checkpoint | Trial | None = None) -> Wizard:
    """The work succeeded. result: the file that was fetched, or what the trial measured. A file that the card cannot hold with
    the answers so far makes it a failure."""
    assert wizard.work, "nothing was to be done"
    if isinstance(result, Trial):
        wizard = replace(wizard, trial=result)
    elif result is not None:
        wizard = replace(wizard, fetched=result)
        try:
            plan_for(wizard)
        except Q27Error as error:
            return failed(replace(wizard, fetched=None), f"{result.path} does not go with the answers: {error}")
    return _settled(_moved(replace(wizard, work="", trouble=""), 1))


def failed(wizard: Wizard, message: str) -> Wizard:
    """The work failed: its step is asked again, also where a flag had answered it."""
    assert wizard.work, "nothing was to be done"
    answers = {step: value for step, value in wizard.answers.items() if step != wizard.step}
    return replace(wizard, work="", trouble=message[:2000], answers=answers, given=wizard.given - {wizard.step})


def applies(wizard: Wizard, step: str) -> bool:
    """Whether a step is asked at all, given the answers so far."""
    answers = wizard.answers
    has_card = answers.get("card", CPU) != CPU
    model = answers.get("model", DEMO)
    if step == "tier":
        return has_card and model in _family_names()
    if step in ("kv", "context", "slots"):
        return has_card and model != DEMO
    if step == "fetch":
        return model in _family_names()
    if step == "trial":
        return answers.get("fetch") != LATER
    if step == "service":
        return wizard.facts.has_user_manager
    return True


def checkpoint_for(wizard: Wizard) -> Checkpoint | None:
    """The checkpoint that the answers mean, as far as they go; the fetched file once it is there. None: not chosen yet."""
    model = _known(wizard).get("model")
    if wizard.fetched and model in _family_names():
        return wizard.fetched
    for entry in FAMILY:
        if entry.name == model:
            return entry
    if model and model.startswith("file:"):
        return next((entry for entry in wizard.facts.models if model_name(entry.path) == model[5:]), None)
    return None


def machine_for(wizard: Wizard) -> Machine | None:
    """The chosen card; None for the CPU or before it is chosen."""
    wish = _known(wizard).get("card")
    return next((machine for machine in wizard.facts.machines if machine.uuid == wish), None)


def plan_for(wizard: Wizard, **changes: str) -> Plan | None:
    """The plan that the answers make, some of them replaced; None without a card or a checkpoint that is planned for. Raises
    Q27Error where it cannot be."""
    answers = {**_known(wizard), **changes}
    wizard = replace(wizard, answers=answers, given=frozenset(answers))
    machine, checkpoint = machine_for(wizard), checkpoint_for(wizard)
    if machine is None or checkpoint is None:
        return None
    tier = None if checkpoint.path else _wish(answers, "tier")
    return make_plan(machine, Wishes(tier, _wish(answers, "kv"), _count(answers, "context"), _count(answers, "slots"),
                                     checkpoint=checkpoint))


def outcome(wizard: Wizard) -> Outcome:
    """What the answers make, as far as they go. Raises Q27Error if they cannot be together."""
    answers, facts = wizard.answers, wizard.facts
    settings: dict[str, Any] = {}
    if answers.get("card") == CPU:
        settings |= {"model.backend": "numpy"} if facts.has_device else {}
    else:
        settings |= {"model.backend": AUTO, "model.gpu": answers.get("card", AUTO)}
    model = answers.get("model", DEMO)
    plan = plan_for(wizard)
    if model == DEMO:
        settings |= {"model.path": DEMO, "model.kv": AUTO, "model.context": AUTO, "model.slots": AUTO}
    elif model.startswith("file:"):
        settings["model.path"] = model[5:]
    elif wizard.fetched is not None:
        settings["model.path"] = model_name(wizard.fetched.path)
    if plan is not None:
        settings |= plan.settings()
    settings |= _habits(answers)
    changed = {key: value for key, value in settings.items() if facts.current.get(key) != value}
    access = answers.get("access", "open")
    return Outcome(changed, access in ("key", "lan") and not facts.current.get("server.api_key_file"),
                   {"yes": "install", "linger": "linger"}.get(answers.get("service", ""), ""), answers.get("clients") == "show")


def _habits(answers: Mapping[str, str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if "idle" in answers:
        settings["model.idle_unload"] = int(answers["idle"])
    if answers.get("access") in ("open", "key"):
        settings["server.host"] = "127.0.0.1"
    if answers.get("access") == "open":
        settings["server.api_key_file"] = ""
    if answers.get("access") == "lan":
        settings["server.host"] = OPEN_HOST
    return settings


def model_name(path: str) -> str:
    """What model.path holds for a file: its name if it lies in the models folder, else its path."""
    from q27app.paths import models_dir

    file = Path(path)
    return file.stem if file.parent == models_dir() and file.suffix == ".q27" else str(file)


def _family_names() -> tuple[str, ...]:
    return tuple(entry.name for entry in FAMILY)


def _known(wizard: Wizard) -> Mapping[str, str]:
    """The answers that count now: of the steps before this one, and of flags. Later ones are only remembered as defaults."""
    if wizard.step not in STEPS:
        return wizard.answers
    before = STEPS[:STEPS.index(wizard.step)]
    return {step: value for step, value in wizard.answers.items() if step in before or step in wizard.given}


def _wish(answers: Mapping[str, str], step: str) -> str | None:
    value = answers.get(step, AUTO)
    return None if value == AUTO else value


def _count(answers: Mapping[str, str], step: str) -> int | None:
    value = _wish(answers, step)
    return None if value is None else int(value)


def _work(wizard: Wizard) -> str:
    """What the answer to the current step asks to be done."""
    value = wizard.answers[wizard.step]
    if wizard.step == "fetch" and value != LATER and not wizard.fetched:
        kind, _, what = value.partition(":")
        return f"{kind} {what}"
    return "trial" if wizard.step == "trial" and value == "yes" and wizard.trial is None else ""


def _moved(wizard: Wizard, by: int) -> Wizard:
    index = STEPS.index(wizard.step) + by
    return replace(wizard, step=STEPS[index] if index < len(STEPS) else "done")


def _settled(wizard: Wizard) -> Wizard:
    """Forward over steps that do not apply and over those that flags answered, whose answers are checked here."""
    while wizard.step in STEPS:
        if not applies(wizard, wizard.step):
            wizard = _moved(replace(wizard, answers={k: v for k, v in wizard.answers.items() if k != wizard.step}), 1)
        elif wizard.step in wizard.given:
            value = _checked(wizard, wizard.answers[wizard.step])
            wizard = replace(wizard, answers={**wizard.answers, wizard.step: value})
            work = _work(wizard)
            if work:
                return replace(wizard, work=work)
            if value == "leave":
                return replace(wizard, step="left")
            wizard = _moved(wizard, 1)
        else:
            return wizard
    return wizard


def _checked(wizard: Wizard, value: str) -> str:
    """The answer as it is kept. Raises UsageError."""
    from q27app.setup.questions import accept, ask

    if len(value) > MAX_ANSWER or any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise UsageError(f"{wizard.step}: an answer of {len(value)} characters, or with control characters, is not one.",
                         "Type one of the answers that are shown.")
    shown = ask(wizard)
    value = value.strip()
    for option in shown.options:
        if option.value.lower() == value.lower():
            if not option.is_possible:
                raise UsageError(f"{wizard.step}: {option.value} cannot be chosen: {option.reason}", _others(shown))
            return option.value
    try:
        return accept(wizard, shown, value)
    except Q27Error as error:
        raise UsageError(f"{wizard.step}: {error.message}", error.hint or _others(shown)) from error


def _others(shown: Question) -> str:
    names = [option.value for option in shown.options if option.is_possible]
    return f"Answers: {', '.join(names)}{f', or {shown.takes}' if shown.takes else ''}."
