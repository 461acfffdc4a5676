"""The questions of the set-up dialogue: for a state of `wizard`, one function a step that says what can be answered and why.

`accept` takes what was typed beside the options: a number of tokens or seconds, a path, a repository.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from q27app.errors import OutOfMemory, Q27Error, UsageError
from q27app.model.budget import KV_FORMATS, MIN_CONTEXT, kv_formats_for
from q27app.setup.checkpoints import FAMILY, PERPLEXITY
from q27app.setup.plan import MAX_AUTO_SLOTS, Plan, make_plan
from q27app.setup.plan_text import budget_rows
from q27app.setup.reasons import REDUCED_CONTEXTS
from q27app.setup.wizard import AUTO, CPU, DEMO, LATER, Option, Question, Wizard, checkpoint_for, machine_for, model_name, outcome, plan_for
from q27app.weights.tiers import QUANTISED_TIERS

MAX_SECONDS = 7 * 86_400
YES, NO = "yes", "no"


def ask(wizard: Wizard) -> Question:
    """The question of the wizard's step, its default what holds now where that can be chosen."""
    made = _ASK[wizard.step](wizard)
    before = wizard.answers.get(wizard.step) or _current(wizard)
    text = made.text + ((f"It did not work: {wizard.trouble}",) if wizard.trouble else ())
    if before and (any(option.value == before and option.is_possible for option in made.options) or (made.takes and _taken(wizard, made, before))):
        return replace(made, default=before, text=text)
    return replace(made, text=text)


def accept(wizard: Wizard, shown: Question, value: str) -> str:
    """What was typed beside the options, as it is kept. Raises UsageError or OutOfMemory."""
    if wizard.step == "context":
        count = _number(value, MIN_CONTEXT, 1_048_576, "tokens")
        plan_for(wizard, context=str(count))
        return str(count)
    if wizard.step == "slots":
        count = _number(value, 1, 64, "requests")
        plan_for(wizard, slots=str(count))
        return str(count)
    if wizard.step == "idle":
        return str(_number(value, 0, MAX_SECONDS, "seconds"))
    if wizard.step == "fetch":
        kind, _, what = value.partition(":")
        if kind == "import" and what:
            return f"import:{Path(what).expanduser()}"
        if re.fullmatch(r"download:[\w.-]+/[\w.-]+(:[\w./-]+)?", value) and ".." not in value:
            return value
    if wizard.step == "card":
        found = [machine for machine in wizard.facts.machines if machine.uuid.lower().startswith(value.lower()) and len(value) >= 8]
        if len(found) == 1:
            return found[0].uuid
    raise UsageError(f"{value[:80]!r} is not an answer.")


def _number(text: str, low: int, high: int, what: str) -> int:
    plain = text.replace(",", "").replace("_", "")
    if not re.fullmatch(r"\d{1,9}", plain) or not low <= int(plain) <= high:
        raise UsageError(f"{text[:40]!r} is not a number of {what} from {low} to {high}.")
    return int(plain)


def _taken(wizard: Wizard, shown: Question, value: str) -> bool:
    try:
        return accept(wizard, shown, value) == value
    except Q27Error:
        return False


def _current(wizard: Wizard) -> str:
    """What the configuration says now, as an answer of this step; "" if nothing."""
    current = wizard.facts.current
    key = {"card": "model.gpu", "kv": "model.kv", "context": "model.context", "slots": "model.slots",
           "idle": "model.idle_unload"}.get(wizard.step)
    if wizard.step == "model":
        path = str(current.get("model.path", ""))
        return f"file:{path}" if path not in ("", DEMO) else ""
    if wizard.step == "access":
        keyed = "key" if current.get("server.api_key_file") else "open"
        return "lan" if current.get("server.host", "127.0.0.1") not in ("127.0.0.1", "localhost", "::1") else keyed
    if wizard.step == "service":
        return YES if wizard.facts.has_service else ""
    value = current.get(key, "") if key else ""
    return "" if value in (AUTO, 0, 0.0) else str(value if not isinstance(value, float) else int(value))


def _budget(wizard: Wizard, **changes: str) -> tuple[tuple[str, int], ...]:
    try:
        plan = plan_for(wizard, **changes)
    except Q27Error:
        return ()
    return () if plan is None else budget_rows(plan)


def _tried(wizard: Wizard, **changes: str) -> Plan | str:
    """The plan with these answers, or in a line why there is none."""
    try:
        plan = plan_for(wizard, **changes)
    except OutOfMemory as error:
        return "does not fit: " + error.message.splitlines()[0]
    except Q27Error as error:
        return error.message.splitlines()[0]
    return plan if plan is not None else "needs a card"


def _planned(wizard: Wizard, value: str, label: str, note: str = "", **changes: str) -> Option:
    plan = _tried(wizard, **changes)
    if isinstance(plan, str):
        return Option(value, label, plan, False)
    return Option(value, label, ", ".join(filter(None, [f"{plan.context:,} tokens x {plan.slots}", note])))


def _checks(wizard: Wizard) -> Question:
    lines = [f"{finding.severity.upper()} {finding.id}: {finding.evidence}" + (f"  Fix: {finding.fix}" if finding.fix else "")
             for finding in wizard.facts.findings if finding.severity != "ok"]
    lines = lines or [f"{len(wizard.facts.findings)} checks, nothing to complain about."]
    failures = len(wizard.facts.failures)
    note = f"{failures} checks failed; what needs them will not work" if failures else ""
    return Question("checks", "This machine", (Option("go", "go on", note), Option("leave", "leave, and fix that first")),
                    "leave" if failures else "go", tuple(lines))


def _card(wizard: Wizard) -> Question:
    options = []
    for number, machine in enumerate(wizard.facts.machines):
        label = f"{machine.name}, {machine.free / 1e9:.1f} GB free"
        try:
            plan = make_plan(machine)
            reason, possible = f"holds {plan.checkpoint.name} {plan.tier}, {plan.context:,} tokens", True
        except OutOfMemory as error:
            fits = getattr(error, "fits", None)
            reason, possible = (f"holds {fits.checkpoint.name}" if fits else "holds nothing of the family"), fits is not None
        except UsageError as error:
            reason, possible = error.message, False
        options.append(Option(machine.uuid, f"{number}: {label}", reason, possible))
    options.append(Option(CPU, "no card: compute on the CPU", "slow; for trying things out"))
    good = [option.value for option in options[:-1] if option.is_possible]
    best = max(good, key=lambda uuid: next(m.free for m in wizard.facts.machines if m.uuid == uuid), default=CPU)
    text = () if wizard.facts.machines else ("No NVIDIA card answers." if not wizard.facts.has_device else
                                             "There is an NVIDIA device, but it does not answer: q27app doctor says why.",)
    return Question("card", "Which card?", tuple(options), best, text, "the beginning of a UUID" if len(options) > 2 else "")


def _model(wizard: Wizard) -> Question:
    options, machine = [], machine_for(wizard)
    for entry in wizard.facts.models:
        value, label = f"file:{model_name(entry.path)}", f"{model_name(entry.path)}: {entry.name}, tier {entry.tier}, {entry.weights / 1e9:.1f} GB"
        options.append(_planned(wizard, value, label, "here", model=value) if machine else Option(value, label, "here"))
    for entry in FAMILY if machine else ():
        generation = f"perplexity {min(PERPLEXITY[entry.generation].values()):.2f} at best" if entry in FAMILY[:2] else ""
        options.append(_planned(wizard, entry.name, entry.name, generation, model=entry.name))
    options.append(Option(DEMO, "the bundled demo model", "knows little; to see that everything works"))
    default = next((option.value for option in options if option.is_possible), DEMO)
    return Question("model", "Which model?", tuple(options), default)


def _tier(wizard: Wizard) -> Question:
    entry = next(item for item in FAMILY if item.name == wizard.answers["model"])
    known = PERPLEXITY[entry.generation]
    tiers = sorted(known if entry in FAMILY[:2] else QUANTISED_TIERS, key=entry.bytes_of)
    options = []
    for tier in tiers:
        note = f"perplexity {known[tier]:.3f}" if entry in FAMILY[:2] else ""
        options.append(_planned(wizard, tier, f"{tier}, {entry.bytes_of(tier) / 1e9:.2f} GB", note, tier=tier))
    plan = _tried(wizard)
    default = plan.tier if isinstance(plan, Plan) else tiers[0]
    text = ("Smaller perplexity is better. A larger tier leaves less room for the window and takes longer for a token.",)
    return Question("tier", "Which tier?", tuple(options), default, text, budget=_budget(wizard, tier=default))


def _kv(wizard: Wizard) -> Question:
    machine = machine_for(wizard)
    checkpoint = checkpoint_for(wizard)
    there = kv_formats_for(machine.capability, checkpoint.config.head_dim) if machine and checkpoint else []
    options = [_planned(wizard, name, name, KV_FORMATS[name].note, kv=name) for name in there]
    plan = _tried(wizard)
    default = plan.kv if isinstance(plan, Plan) else options[0].value if options else ""
    return Question("kv", "Which format for the cache of keys and values?", tuple(options), default, budget=_budget(wizard, kv=default))


def _context(wizard: Wizard) -> Question:
    plan = _tried(wizard)
    largest = plan.context if isinstance(plan, Plan) else 0
    options = [Option(str(largest), f"{largest:,} tokens", "the largest that fits" if largest else "nothing fits", largest > 0)]
    for size in REDUCED_CONTEXTS:
        if size < largest:
            options.append(_planned(wizard, str(size), f"{size:,} tokens", context=str(size)))
    return Question("context", "How long may a conversation be?", tuple(options), str(largest), takes=f"a number of tokens from {MIN_CONTEXT}",
                    budget=_budget(wizard, context=str(largest)) if largest else ())


def _slots(wizard: Wizard) -> Question:
    plan = _tried(wizard)
    default = str(plan.slots) if isinstance(plan, Plan) else "1"
    options = [_planned(wizard, str(count), f"{count} at once" if count > 1 else "one after the other", slots=str(count))
               for count in range(1, MAX_AUTO_SLOTS + 1)]
    return Question("slots", "How many requests at once?", tuple(options), default, ("Each has the whole window.",), "a number up to 64",
                    budget=_budget(wizard, slots=default))


def _fetch(wizard: Wizard) -> Question:
    model, tier = wizard.answers["model"], wizard.answers.get("tier", "q4s")
    entry = next(item for item in FAMILY if item.name == model)
    size = entry.bytes_of(tier)
    source = wizard.facts.sources.get((entry.generation, tier)) if entry in FAMILY[:2] else None
    options = []
    if source:
        enough = size < wizard.facts.disk_free
        room = f"{size / 1e9:.1f} GB, {wizard.facts.disk_free / 1e9:.0f} GB are free"
        options.append(Option(f"download:{source}", f"download {source}", room if enough else f"does not fit the disk: {room}", enough))
    options.append(Option(LATER, "later, by q27app pull, import or convert", "the other settings are written; the model stays as it is"))
    text = () if source else (f"No repository is known for {model} {tier}.",)
    return Question("fetch", "Where does the file come from?", tuple(options), options[0].value if options[0].is_possible else LATER, text,
                    "import:PATH of a .q27, GGUF or safetensors folder, or download:OWNER/REPO:FILE")


def _trial(wizard: Wizard) -> Question:
    if wizard.trial is not None:
        used = "" if wizard.trial.used is None else f", {wizard.trial.used / 1e9:.2f} GB of the card"
        text: tuple[str, ...] = (f"Measured: {wizard.trial.tokens_per_s:.1f} tokens/s, loaded in {wizard.trial.load_s:.0f} s{used}.",)
    else:
        text = ("Loads the model as it was set up, has it say something, and measures.",)
    busy = wizard.facts.daemon_answers
    if busy:
        text += ("A daemon answers already. If it holds this card, unload its model first: q27app unload.",)
    return Question("trial", "Try it now?", (Option(YES, "yes"), Option(NO, "no")), NO if busy or wizard.trouble else YES, text)


def _idle(wizard: Wizard) -> Question:
    machine = machine_for(wizard)
    shared = machine is not None and machine.has_display
    options = (Option("0", "never", "it always answers at once"), Option("900", "after 15 minutes", "the next request waits for the load"),
               Option("3600", "after an hour"))
    text = ("A desktop runs on this card: other programs get its memory while nobody asks.",) if shared else ()
    return Question("idle", "Give the memory back when nobody asks?", options, "900" if shared else "0", text, "a number of seconds")


def _service(wizard: Wizard) -> Question:
    options = [Option(NO, "no: I start q27app serve by hand"), Option(YES, "yes: as a systemd user service")]
    text = []
    if wizard.facts.lingers is False:
        options.append(Option("linger", "yes, and also while I am not logged in", "enables linger for this user"))
        text.append("Without linger systemd stops a user's services at log-out and does not start them at boot.")
    return Question("service", "Run it as a service?", tuple(options), NO, tuple(text))


def _access(wizard: Wizard) -> Question:
    has_key = bool(wizard.facts.current.get("server.api_key_file"))
    key = "with the key that is set up" if has_key else "with a key that is made now"
    return Question("access", "Who may ask it?", (
        Option("open", "programs of this machine"), Option("key", f"programs of this machine, {key}"),
        Option("lan", f"other machines too, {key}", "listens on every address; HTTP is not encrypted")), "open")


def _clients(wizard: Wizard) -> Question:
    found = ", ".join(wizard.facts.clients)
    text = (f"Installed here: {found}." if found else "No coding client was found on PATH.",)
    return Question("clients", "Show how coding clients are started?", (Option("show", "yes"), Option("skip", "no")),
                    "show" if found else "skip", text)


def _review(wizard: Wizard) -> Question:
    made = outcome(wizard)
    lines = [f"{key} = {value!r}" for key, value in made.settings.items()] or ["nothing in the configuration changes"]
    lines += ["a key file is made, readable by you alone"] if made.makes_key else []
    lines += ["the service is installed and started" + (", linger is enabled" if made.service == "linger" else "")] if made.service else []
    return Question("review", "Write this?", (Option("write", "yes"), Option("leave", "no, leave everything as it was")), "write",
                    tuple(lines), budget=_budget(wizard))


_ASK = {"checks": _checks, "card": _card, "model": _model, "tier": _tier, "kv": _kv, "context": _context, "slots": _slots,
        "fetch": _fetch, "trial": _trial, "idle": _idle, "service": _service, "access": _access, "clients": _clients,
        "review": _review}
