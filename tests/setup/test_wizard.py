"""The set-up dialogue as a state machine, on machines that are not there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from q27app.errors import UsageError
from q27app.paths import demo_model
from q27app.setup.cards import GIB
from q27app.setup.checkpoints import checkpoint_of
from q27app.setup.doctor import Finding
from q27app.setup.facts import Facts
from q27app.setup.plan import Machine
from q27app.setup.wizard import (
    MAX_ANSWER, STEPS, Trial, answered, back, begin, failed, model_name, outcome, plan_for, question, worked,
)

ADA = Machine("RTX 4090", (8, 9), int(23.5 * GIB), 24 * GIB, "GPU-11111111-aa")
OLD = Machine("RTX 2080 Ti", (7, 5), 11 * GIB, 11 * GIB, "GPU-22222222-bb")
SMALL = Machine("RTX 3060 12GB", (8, 6), int(11.6 * GIB), 12 * GIB, "GPU-33333333-cc", has_display=True)
SOURCES = {("3.6", "q4s"): "owner/repo:q.q27"}
CURRENT = {"model.path": "demo", "model.gpu": "auto", "model.kv": "auto", "model.context": "auto", "model.slots": "auto",
           "model.backend": "auto", "model.idle_unload": 0.0, "server.host": "127.0.0.1", "server.api_key_file": ""}
FACTS = Facts(machines=(ADA, OLD, SMALL), has_device=True, sources=SOURCES, disk_free=100 * GIB, has_user_manager=True,
              lingers=False, current=CURRENT, clients=("claude",))


def walk(wizard, **answers):
    """Answer by step, defaults elsewhere, until the step "stop" or the end."""
    stop = answers.pop("stop", None)
    for _ in range(40):
        if wizard.step in ("done", "left", stop):
            return wizard
        if wizard.work:
            wizard = worked(wizard, Trial(50.0, 9.0) if wizard.work == "trial" else None)
            continue
        wizard = answered(wizard, answers.get(wizard.step, question(wizard).default))
    raise AssertionError(f"the dialogue does not end: {wizard.step}")


def values(wizard, possible=None):
    return [option.value for option in question(wizard).options if possible is None or option.is_possible == possible]


def test_defaults_alone_lead_to_a_plan_that_fits():
    wizard = walk(begin(FACTS), fetch="later")
    made = outcome(wizard)
    plan = plan_for(wizard)
    assert made.settings == {"model.gpu": ADA.uuid, **plan.settings()}
    assert plan.peak + plan.reserve <= ADA.free and made.service == "" and not made.makes_key and made.shows_clients


def test_what_cannot_be_is_shown_with_its_reason_and_refused():
    wizard = walk(begin(FACTS), stop="card")
    assert values(wizard, possible=False) == [OLD.uuid]
    with pytest.raises(UsageError, match="compute capability 7.5"):
        answered(wizard, OLD.uuid)
    wizard = walk(wizard, card=SMALL.uuid, stop="model")
    assert "Qwen3.6-27B" in values(wizard, possible=False) and "Qwen3.5-9B" in values(wizard, possible=True)
    assert question(wizard).default == "Qwen3.5-9B"
    with pytest.raises(UsageError, match="does not fit"):
        answered(wizard, "Qwen3.6-27B")


def test_the_budget_follows_the_answers():
    wizard = walk(begin(FACTS), stop="context")
    full = dict(question(wizard).budget)
    wizard = walk(wizard, context="32768", stop="slots")
    less = dict(question(wizard).budget)
    assert less["KV cache"] < full["KV cache"] and less["left"] > full["left"] >= 0
    assert less["weights"] == full["weights"] > 15e9


def test_numbers_are_taken_beside_the_options_and_bounded():
    wizard = walk(begin(FACTS), stop="context")
    assert answered(wizard, "50,000").answers["context"] == "50000"
    for bad in ("9999999", "0", "-5", "1e5", "9" * 30, "x", ""):
        with pytest.raises(UsageError, match="^context: "):
            answered(wizard, bad)
    assert wizard.step == "context"


def test_a_card_is_chosen_by_the_beginning_of_its_uuid():
    wizard = walk(begin(FACTS), stop="card")
    assert answered(wizard, "gpu-3333").answers["card"] == SMALL.uuid
    with pytest.raises(UsageError):
        answered(wizard, "GPU-")


def test_going_back_keeps_answers_as_defaults_and_asks_again_what_depends_on_them():
    wizard = walk(begin(FACTS), tier="q4s", context="65536", stop="slots")
    for expected in ("context", "kv", "tier", "model", "card"):
        wizard = back(wizard)
        assert wizard.step == expected
    assert back(back(wizard)).step == "checks"
    wizard = answered(wizard, SMALL.uuid)
    assert question(wizard).default == "Qwen3.5-9B", "answers for another card must not count here"
    wizard = walk(wizard, stop="context")
    assert question(wizard).default == "65536"


def test_a_new_model_forgets_what_was_measured_and_fetched():
    wizard = walk(begin(FACTS), fetch="later", stop="review")
    assert wizard.trial is None
    wizard = walk(begin(FACTS), model="demo", stop="idle")
    assert wizard.trial == Trial(50.0, 9.0)
    while wizard.step != "model":
        wizard = back(wizard)
    assert answered(wizard, "Qwen3.6-27B").trial is None


def test_a_download_is_work_and_its_failure_is_told_where_it_is_asked_again():
    wizard = walk(begin(FACTS), tier="q4s", stop="fetch")
    assert question(wizard).default == "download:owner/repo:q.q27"
    wizard = answered(wizard, "download:owner/repo:q.q27")
    assert wizard.work == "download owner/repo:q.q27" and question(wizard) is None
    wizard = failed(wizard, "the hub has no such file.")
    assert wizard.step == "fetch" and "no such file" in question(wizard).text[-1]
    assert back(wizard).step == "slots"


def test_an_imported_file_counts_with_its_own_bytes():
    wizard = walk(begin(FACTS), tier="q4s", stop="fetch")
    wizard = answered(wizard, "import:/somewhere/my.q27")
    assert wizard.work == "import /somewhere/my.q27"
    demo = checkpoint_of(demo_model())
    wizard = worked(wizard, demo)
    assert wizard.step == "trial" and outcome(walk(wizard, trial="no")).settings["model.path"] == model_name(demo.path)
    huge = replace(demo, weights=40 * GIB)
    again = worked(answered(walk(begin(FACTS), stop="fetch"), "import:/x.q27"), huge)
    assert again.step == "fetch" and "does not go with the answers" in again.trouble


def test_without_a_source_no_download_is_offered():
    wizard = walk(begin(replace(FACTS, sources={})), stop="fetch")
    assert values(wizard) == ["later"] and "No repository is known" in question(wizard).text[0]
    for bad in ("download:", "download:../x:y", "import:", "download:a/b:../../etc/passwd"):
        with pytest.raises(UsageError):
            answered(wizard, bad)


def test_a_full_disk_takes_no_download():
    wizard = walk(begin(replace(FACTS, disk_free=GIB)), tier="q4s", stop="fetch")
    assert values(wizard, possible=False) == ["download:owner/repo:q.q27"] and question(wizard).default == "later"


def test_flags_answer_their_steps_and_are_checked():
    given = {"card": "cpu", "model": "demo", "trial": "no", "idle": "0", "service": "yes", "access": "key", "clients": "skip"}
    wizard = begin(FACTS, given)
    assert wizard.step == "checks"
    wizard = answered(wizard, "go")
    assert wizard.step == "review"
    made = outcome(answered(wizard, "write"))
    assert made.settings == {"model.backend": "numpy"} and made.makes_key and made.service == "install"
    with pytest.raises(UsageError, match="KV format fp12 cannot be used"):
        answered(begin(FACTS, {"card": ADA.uuid, "model": "Qwen3.6-27B", "tier": "q4s", "kv": "fp12"}), "go")
    with pytest.raises(UsageError, match="no step"):
        begin(FACTS, {"colour": "red"})


def test_going_back_passes_over_what_flags_answered():
    wizard = answered(begin(FACTS, {"card": ADA.uuid, "tier": "q4s"}), "go")
    wizard = walk(wizard, stop="kv")
    assert back(wizard).step == "model"


def test_running_it_again_offers_what_is_set_up():
    current = {**CURRENT, "model.gpu": SMALL.uuid, "model.context": 40_000, "model.kv": "fp16", "model.idle_unload": 900.0,
               "server.host": "0.0.0.0", "server.api_key_file": "/k"}
    wizard = walk(begin(replace(FACTS, current=current, has_service=True)), stop="review", fetch="later")
    assert wizard.answers["card"] == SMALL.uuid and wizard.answers["context"] == "40000"
    assert wizard.answers["idle"] == "900" and wizard.answers["access"] == "lan" and wizard.answers["service"] == "yes"
    made = outcome(wizard)
    assert set(made.settings) <= {"model.slots", "model.embed"} and not made.makes_key


def test_a_shared_card_is_given_back_by_default():
    wizard = walk(begin(FACTS), card=SMALL.uuid, fetch="later", stop="idle")
    assert question(wizard).default == "900" and "desktop" in question(wizard).text[0]


def test_without_a_card_the_cpu_is_told_and_with_a_silent_one_why():
    wizard = walk(begin(Facts(current=CURRENT)), stop="card")
    assert question(wizard).default == "cpu" and "No NVIDIA card" in question(wizard).text[0]
    broken = Facts((Finding("GPU-DRIVER", "failure", "silent", "nvidia-smi"),), has_device=True, current=CURRENT)
    assert question(begin(broken)).default == "leave" and walk(begin(broken)).step == "left"
    wizard = walk(begin(broken), checks="go", stop="card")
    assert "does not answer" in question(wizard).text[0]
    assert outcome(walk(wizard, card="cpu")).settings["model.backend"] == "numpy", "the CPU is chosen, never fallen back to"


@pytest.mark.parametrize("text", ["\x1b[31m", "a\nb", "x" * (MAX_ANSWER + 1), "\x00", "../../../etc/passwd", "go; rm -rf /"])
def test_hostile_answers_change_nothing(text):
    for stop in STEPS:
        wizard = walk(begin(FACTS), fetch="later", stop=stop)
        if wizard.step == stop:
            with pytest.raises(UsageError) as caught:
                answered(wizard, text)
            assert len(str(caught.value)) < 1000 and "\x1b" not in str(caught.value)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 20), st.text(max_size=20), st.just("back")), max_size=30))
def test_any_answers_lead_to_a_state_that_can_go_on(moves):
    wizard = begin(FACTS)
    for move in moves:
        if wizard.step in ("done", "left"):
            break
        if wizard.work:
            wizard = failed(wizard, "no")
            continue
        shown = question(wizard)
        try:
            if move == "back":
                wizard = back(wizard)
            else:
                wizard = answered(wizard, shown.options[move % len(shown.options)].value if isinstance(move, int) else move)
        except UsageError:
            continue
        plan = plan_for(wizard)
        assert plan is None or plan.peak + plan.reserve <= plan.machine.free
    outcome(wizard)
