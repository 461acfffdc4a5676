"""Plans: a golden table of cards, and what holds for every card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from q27app.cli_setup import plan as plan_command
from q27app.engine import loading
from q27app.errors import UsageError
from q27app.gpu import GpuInfo
from q27app.model.budget import kv_formats_for
from q27app.setup import plan as planning
from q27app.setup.cards import CARDS, GIB, bandwidth_of, find_card, parse_arch
from q27app.setup.checkpoints import FAMILY, checkpoint_of, family_checkpoint, good_tiers
from q27app.gpu import choose_card
from q27app.setup.plan import Machine, TooSmall, User, Wishes, make_plan, reserve_of
from q27app.setup.plan_text import plan_dict, plan_text, table_line

GOLDEN = Path(__file__).parent / "plans.txt"
EXTRA = (
    Machine("RTX 3090, 23.1 GiB free", (8, 6), int(23.1 * GIB)),
    Machine("RTX 4090 with a desktop", (8, 9), int(22.4 * GIB), has_display=True),
    Machine("RTX 4090 under WSL", (8, 9), int(23.2 * GIB), is_wsl=True),
    Machine("RTX 5090 half in use", (12, 0), int(16.0 * GIB), users=(User(42, "blender", 15 * GIB),)),
)


def machines():
    return [Machine(card.name, card.capability, int(card.free_gib * GIB)) for card in CARDS] + list(EXTRA)


def best(machine, wishes=Wishes()):
    try:
        return make_plan(machine, wishes)
    except TooSmall as error:
        return error.fits


def test_the_table_of_cards_is_as_written():
    assert len(machines()) >= 20
    text = "".join(table_line(best(machine)) + "\n" for machine in machines())
    assert text == GOLDEN.read_text()


def test_published_file_sizes_are_met():
    sizes = {tier: round(family_checkpoint("3.6").bytes_of(tier) / 1e9, 2) for tier in ("q4s", "default", "q5f", "q6k", "q8")}
    assert sizes == {"q4s": 15.46, "default": 17.73, "q5f": 18.22, "q6k": 23.25, "q8": 28.45}
    assert round(family_checkpoint("3.8").bytes_of("q6") / 1e9, 2) == 19.76


CAPABILITIES = st.sampled_from([(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])


@settings(max_examples=60, deadline=None)
@given(CAPABILITIES, st.integers(1, 150 * GIB), st.booleans(), st.booleans(), st.sampled_from(["speed", "balanced", "quality"]))
def test_the_peak_never_reaches_the_reserve(capability, free, display, wsl, prefer):
    machine = Machine("any", capability, free, has_display=display, is_wsl=wsl)
    try:
        plan = make_plan(machine, Wishes(prefer=prefer))
    except TooSmall as error:
        plan = error.fits
    if plan is not None:
        assert plan.peak <= machine.free - reserve_of(machine)
        assert reserve_of(machine) >= planning.DESKTOP_BYTES * display + planning.WSL_BYTES * wsl


@settings(max_examples=40, deadline=None)
@given(CAPABILITIES, st.integers(17 * GIB, 150 * GIB), st.integers(0, 30 * GIB), st.sampled_from([None, "q4s", "q6k"]))
def test_more_memory_never_shortens_the_window(capability, free, more, tier):
    def window(size):
        try:
            return make_plan(Machine("any", capability, size), Wishes(tier=tier)).context
        except TooSmall:
            return 0

    assert window(free) <= window(free + more)


@pytest.mark.parametrize("machine", machines(), ids=lambda machine: machine.name)
def test_alternatives_fit_too(machine):
    plan = best(machine)
    for other in plan.alternatives:
        wishes = Wishes(other.tier, other.kv, other.context, other.slots, checkpoint=plan.checkpoint)
        again = make_plan(machine, wishes)
        assert again.peak <= machine.free - again.reserve and other.costs


def test_figures_are_those_of_the_engine():
    assert planning.MAX_AUTO_SLOTS == loading.MAX_AUTO_SLOTS
    assert all(planning.card_prefill_rows(gib << 30) == loading.auto_chunk("cuda", gib << 30) for gib in (8, 24, 32, 48, 80))


def test_a_desktop_and_wsl_cost_window():
    windows = [best(Machine("4090", (8, 9), int(23.2 * GIB), **extra), Wishes(kv="fp8")).context
               for extra in ({}, {"has_display": True}, {"is_wsl": True})]
    assert windows[0] > windows[1] > windows[2]


def test_a_small_card_is_told_what_fits():
    with pytest.raises(TooSmall, match="does not fit") as caught:
        make_plan(Machine("RTX 4080", (8, 9), int(15.6 * GIB), users=(User(7, "game", GIB),)))
    assert "Qwen3.5-9B fits" in caught.value.hint and "game (process 7) holds 1.1 GB" in caught.value.message
    with pytest.raises(TooSmall) as caught:
        make_plan(Machine("tiny", (8, 6), GIB))
    assert caught.value.fits is None


def test_a_card_that_is_too_old_and_a_format_that_it_lacks_are_refused():
    with pytest.raises(UsageError, match="7.5, the kernels need 8.0"):
        make_plan(Machine("RTX 2080 Ti", (7, 5), 11 * GIB))
    with pytest.raises(UsageError, match="fp8 cannot be used on RTX 3090"):
        make_plan(Machine("RTX 3090", (8, 6), 24 * GIB), Wishes(kv="fp8"))
    assert "fp8" not in kv_formats_for((8, 6)) and "fp8" in kv_formats_for((8, 9))


def test_every_choice_has_a_reason_and_the_text_shows_it():
    plan = best(EXTRA[1])
    text = plan_text(plan)
    assert [choice.what for choice in plan.choices] == ["model", "tier", "KV format", "context", "embedding", "slots", "drafts"]
    assert all(choice.reason in text for choice in plan.choices) and "a desktop runs on this card" in text


AMPERE = Machine("RTX 3090, 23.1 GiB free", (8, 6), int(23.1 * GIB))


def test_a_24_gb_ampere_card_holds_the_whole_native_window():
    plan = best(AMPERE)
    assert (plan.tier, plan.kv, plan.context, plan.slots) == ("q4s", "turbo5k", 262_144, 1)
    deep = best(AMPERE, Wishes(kv="turbo3", slots=2))
    assert deep.context >= 196_608 and deep.slots == 2 and deep.peak <= AMPERE.free - deep.reserve
    deepest = best(AMPERE, Wishes(prefer="window"))
    assert deepest.kv == "turbo3" and deepest.context == 262_144
    assert "deepest" in next(choice.reason for choice in deepest.choices if choice.what == "KV format")


def test_a_card_with_fp8_keeps_it_where_the_window_fits():
    plan = best(Machine("32 GB", (12, 0), int(31.4 * GIB)))
    assert (plan.kv, plan.context) == ("fp8", 262_144)


def test_a_window_beyond_the_native_one_is_only_taken_when_asked_for_and_warned_of():
    big = Machine("H200", (9, 0), 139 * GIB)
    assert best(big).context == 262_144
    plan = best(big, Wishes(context=655_360))
    assert plan.context == 655_360 and any("beyond the native 262144" in text for text in plan.warnings)
    assert "beyond the native" in plan_text(plan)
    with pytest.raises(UsageError, match="655361 tokens, expected at most 655360"):
        make_plan(big, Wishes(context=655_361))


def test_the_embedding_moves_to_host_memory_where_that_buys_window():
    card = Machine("RTX 4000 Ada", (8, 9), int(19.5 * GIB))
    plan, stays = best(card), best(card, Wishes(embed="device"))
    assert plan.embed_in_host and not stays.embed_in_host and plan.context > stays.context + 65_536
    assert plan.settings()["model.embed"] == "host" and "GB of the card become window" in plan_text(plan)
    assert not best(AMPERE).embed_in_host   # the native window fits anyway
    assert best(AMPERE, Wishes(embed="host")).embed_in_host
    tied = make_plan(Machine("small", (8, 6), 5 * GIB), Wishes(checkpoint=FAMILY[3], embed="host"))
    assert not tied.embed_in_host and "it is the head as well" in plan_text(tied)


def test_slots_share_evenly():
    plan = best(Machine("48 GB", (8, 9), 47 * GIB), Wishes(slots=3))
    assert plan.memory.num_blocks == 3 * -(-plan.context // 64)


def test_a_file_is_planned_with_its_own_bytes():
    from q27app.paths import demo_model

    demo = checkpoint_of(demo_model())
    plan = make_plan(Machine("any", (8, 6), 4 * GIB), Wishes(checkpoint=demo))
    assert plan.memory.weights == demo.weights < demo_model().stat().st_size and plan.context == demo.config.max_context
    assert plan.tier == demo.tier


def test_tiers_are_chosen_by_quality():
    assert good_tiers("3.6", "balanced") == ["q4s", "q5f"] and good_tiers("3.6", "speed") == ["q4s"]
    assert good_tiers("3.8", "quality")[-1] == "q6k"


CARDS_OF_A_MACHINE = tuple(
    GpuInfo(index, f"GPU-{index}{index}aa-bb", name, (8, 6), memory, 0, memory, pci_bus_id=f"00000000:0{index}:00.0")
    for index, (name, memory) in enumerate([("NVIDIA GeForce RTX 3060", 12 * GIB), ("NVIDIA GeForce RTX 3090", 24 * GIB)]))


def test_a_card_is_chosen_by_uuid_index_address_or_name():
    def pick(wish):
        card = choose_card(wish, CARDS_OF_A_MACHINE)
        return None if card is None else card.index

    assert [pick(wish) for wish in (None, "GPU-00AA-BB", "0", "00000000:01:00.0", "rtx 3060", "H200")] == [1, 0, 0, 1, 0, None]
    with pytest.raises(UsageError, match="could be 2 cards") as caught:
        pick("geforce")
    assert "GPU-11aa-bb" in caught.value.hint
    assert choose_card(None, ()) is None


def test_names_of_cards():
    assert find_card("3090").name == "RTX 3090" and find_card("rtx 3090 ti").name == "RTX 3090 Ti"
    assert bandwidth_of("NVIDIA GeForce RTX 3090 Ti") == 1008 and bandwidth_of("NVIDIA H200") == 4800
    assert bandwidth_of("Voodoo 2") is None
    assert [parse_arch(text) for text in ("86", "8.9", "sm_120")] == [(8, 6), (8, 9), (12, 0)]
    for bad in ("x", "", "8"):
        with pytest.raises(UsageError):
            parse_arch(bad)
    with pytest.raises(UsageError, match="no card"):
        find_card("???")


@pytest.mark.parametrize("size", ["nan", "inf", "1e300", "0", "-3"])
def test_memory_that_no_card_has_is_refused(size):
    done = CliRunner().invoke(plan_command, ["--vram", size, "--arch", "86"])
    assert isinstance(done.exception, UsageError) and "--vram" in str(done.exception)


def test_the_command_plans_for_a_named_card_and_for_figures():
    runner = CliRunner()
    done = runner.invoke(plan_command, ["--vram", "23.1", "--arch", "86", "--kv", "fp16", "--json"])
    plan = json.loads(done.stdout)
    assert plan["model"]["tier"] == "q4s" and plan["settings"]["model.kv"] == "fp16" and plan["peak"] < 23.1 * GIB
    assert json.dumps(plan_dict(make_plan(Machine("a card of 23.1 GiB", (8, 6), int(23.1 * GIB)), Wishes(kv="fp16")))) \
        == done.stdout.strip()
    assert "H200" in runner.invoke(plan_command, ["--gpu", "h200"]).stdout
    small = runner.invoke(plan_command, ["--vram", "12", "--arch", "89"])
    assert isinstance(small.exception, TooSmall) and "Qwen3.5-9B" in small.stdout
    assert FAMILY[2].name == "Qwen3.5-9B"
