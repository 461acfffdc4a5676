"""What this card should run: tier, KV format, context, slots, drafts, each with its reason. Pure: no card is touched.

`make_plan` tries configurations with `model.budget.plan_memory`, the arithmetic that the engine allocates by, so that plan
and engine cannot disagree. The rungs of the ladder, each taken only if it keeps the window of the one before:

    1  smallest tier, the KV format that gives the longest window      until the native window is reached; the plain ones
                                                                       before those that turn rows (fp8 where there is fp8)
    2  better tiers, in order                                          while the native window still fits
    3  more exact KV formats                                           while the native window still fits
    4  more slots, up to 4                                             while each has the native window

The wish for the longest window takes the smallest format there is. So more free memory never gives a shorter window. The
embedding leaves the card only where the first rung then has a longer window. What is planned stays below free memory less
`reserve`:

    RUNTIME_BYTES   CUDA context, kernels, records of speculative rows, sampling
    DESKTOP_BYTES   a desktop on this card grows by this much      WSL_BYTES   the other system's share that WSL hides
    margin          a sixteenth of the rest, as in the engine
"""

from __future__ import annotations

from dataclasses import dataclass, field

from q27app.errors import OutOfMemory, UsageError
from q27app.model.budget import KV_FORMATS, LACKING_ROWS, MemoryPlan, card_prefill_rows, card_scratch_bytes, kv_formats_for, place_embedding, plan_memory
from q27app.setup.cards import OLDEST
from q27app.setup.checkpoints import FAMILY, Checkpoint, family_checkpoint, good_tiers

RUNTIME_BYTES = 700 << 20
DESKTOP_BYTES = 512 << 20
WSL_BYTES = 1331 << 20
MARGIN_SHARE = 16
MAX_AUTO_SLOTS = 4
LOGIT_ROWS = 64
SHORT_CONTEXT = 32_768
"""A coding agent needs about this much; less is told as a warning."""


PREFERENCES = ("speed", "balanced", "quality", "window")


@dataclass(frozen=True)
class User:
    """A program that holds memory of the card."""

    pid: int
    name: str
    nbytes: int


@dataclass(frozen=True)
class Machine:
    """The card to plan for. free: bytes free now; total: of the card. driver_cuda: newest CUDA that the driver runs."""

    name: str
    capability: tuple[int, int]
    free: int
    total: int = 0
    uuid: str = ""
    driver_cuda: tuple[int, int] | None = None
    users: tuple[User, ...] = ()
    has_display: bool = False
    is_wsl: bool = False
    bandwidth: int | None = None


@dataclass(frozen=True)
class Wishes:
    """None = auto. prefer: one of PREFERENCES. embed: auto, device or host. checkpoint: a file's, or None for the 27B of `generation`."""

    tier: str | None = None
    kv: str | None = None
    context: int | None = None
    slots: int | None = None
    generation: str = "3.6"
    prefer: str = "balanced"
    checkpoint: Checkpoint | None = None
    embed: str = "auto"


@dataclass(frozen=True)
class Choice:
    """One decision and why."""

    what: str
    value: str
    reason: str


@dataclass(frozen=True)
class Alternative:
    """Another configuration that fits. costs: what it gives and takes, compared with the plan."""

    tier: str
    kv: str
    context: int
    slots: int
    costs: str


@dataclass(frozen=True)
class Plan:
    """The result. reserve: bytes left alone; peak: the most that will be held, the runtime included."""

    machine: Machine
    checkpoint: Checkpoint
    tier: str
    kv: str
    context: int
    slots: int
    reserve: int
    embed_in_host: bool
    memory: MemoryPlan
    choices: tuple[Choice, ...]
    alternatives: tuple[Alternative, ...] = ()
    warnings: tuple[str, ...] = field(default_factory=tuple)

    @property
    def peak(self) -> int:
        return self.memory.held

    def settings(self) -> dict[str, int | str]:
        """Keys of config.toml that make the engine follow the plan."""
        return {"model.kv": self.kv, "model.context": self.context, "model.slots": self.slots,
                "model.embed": "host" if self.embed_in_host else "device"}


class TooSmall(OutOfMemory):
    """No configuration of the checkpoint fits. `fits` is a smaller checkpoint's plan, or None."""

    def __init__(self, message: str, hint: str, fits: Plan | None) -> None:
        super().__init__(message, hint)
        self.fits = fits


def reserve_of(machine: Machine) -> int:
    """Bytes of the card's free memory that a plan leaves alone."""
    extra = _extra(machine)
    return extra + max(0, machine.free - RUNTIME_BYTES - extra) // MARGIN_SHARE


def _extra(machine: Machine) -> int:
    return (DESKTOP_BYTES if machine.has_display else 0) + (WSL_BYTES if machine.is_wsl else 0)


def make_plan(machine: Machine, wishes: Wishes = Wishes()) -> Plan:
    """The best configuration for the card.

    Raises GpuError-like UsageError for a card or a wish that cannot be, TooSmall if nothing fits.
    """
    if machine.capability < OLDEST:
        number = ".".join(map(str, machine.capability))
        raise UsageError(f"{machine.name} has compute capability {number}, the kernels need 8.0 or newer.",
                         "Use an RTX 30 or newer, an A or L card, H100 or newer.")
    checkpoint = wishes.checkpoint or family_checkpoint(wishes.generation)
    search = _Search(machine, checkpoint, wishes, _formats(machine, wishes, checkpoint.config.head_dim))
    try:
        tier, kv, memory = search.climb()
    except OutOfMemory as error:
        raise _too_small(machine, checkpoint, wishes, error) from error
    return search.described(tier, kv, memory)


def _formats(machine: Machine, wishes: Wishes, head_dim: int) -> list[str]:
    """KV formats to choose among, the most exact first."""
    there = kv_formats_for(machine.capability, head_dim)
    if wishes.kv is not None:
        if wishes.kv not in there:
            raise UsageError(f"KV format {wishes.kv} cannot be used on {machine.name} "
                             f"(compute capability {'.'.join(map(str, machine.capability))}) with heads of {head_dim} numbers.",
                             f"Choose one of {', '.join(there)}.")
        return [wishes.kv]
    if wishes.prefer == "window" and (deepest := [name for name in there if KV_FORMATS[name].is_deepest]):
        return deepest
    return [name for name in there if KV_FORMATS[name].is_automatic]


def _too_small(machine: Machine, checkpoint: Checkpoint, wishes: Wishes, error: OutOfMemory) -> TooSmall:
    fits = None
    size = checkpoint.bytes_of(wishes.tier or "q4s")
    for smaller in FAMILY[2:] if wishes.context is None and wishes.slots is None else ():
        if smaller.bytes_of("q4s") < size and fits is None:
            try:
                fits = make_plan(machine, Wishes(kv=wishes.kv, prefer=wishes.prefer, checkpoint=smaller))
            except OutOfMemory:
                continue
    users = "".join(f" {user.name} (process {user.pid}) holds {user.nbytes / 1e9:.1f} GB." for user in machine.users[:3])
    advice = f"{fits.checkpoint.name} fits: tier {fits.tier}, {fits.context} tokens." if fits else error.hint
    return TooSmall(f"{error.message}{users}", advice, fits)


class _Search:
    """Tries configurations of one checkpoint on one card."""

    def __init__(self, machine: Machine, checkpoint: Checkpoint, wishes: Wishes, formats: list[str]) -> None:
        self.machine, self.checkpoint, self.wishes, self.formats = machine, checkpoint, wishes, formats
        self.free = max(0, machine.free - RUNTIME_BYTES - _extra(machine))
        self.native = checkpoint.config.max_context
        self.embed = wishes.embed
        self.in_host: dict[tuple[str, str, int, int], bool] = {}
        """Of every configuration that was tried, whether its embedding table stays in host memory."""

    def memory(self, tier: str, kv: str, context: int | None, slots: int | None) -> MemoryPlan:
        """Raises OutOfMemory."""
        config = self.checkpoint.config

        def plan(weights: int) -> MemoryPlan:
            return plan_memory(config, free=self.free, weights=weights, scratch=card_scratch_bytes(config, card_prefill_rows(self.free), LOGIT_ROWS),
                               kv_format=kv, margin=self.free // MARGIN_SHARE, context=context, slots=slots, runtime=RUNTIME_BYTES,
                               lacking_rows=LACKING_ROWS.get(self.machine.capability, 0))

        memory, in_host = place_embedding(plan, self.checkpoint.bytes_of(tier), self.checkpoint.embed_bytes(tier), self.embed,
                                          self.native if context is None else context)
        self.in_host[tier, kv, memory.max_context, memory.num_slots] = in_host
        return memory

    def tried(self, tier: str, kv: str, context: int | None, slots: int | None) -> MemoryPlan | None:
        try:
            return self.memory(tier, kv, context, slots)
        except OutOfMemory:
            return None

    def tiers(self) -> list[str]:
        if self.checkpoint.path:
            return [self.checkpoint.tier]
        return [self.wishes.tier] if self.wishes.tier else good_tiers(self.checkpoint.generation, self.wishes.prefer)

    def climb(self) -> tuple[str, str, MemoryPlan]:
        """(tier, KV format, memory). Raises OutOfMemory if not even the first rung holds."""
        context, slots, tiers = self.wishes.context, self.wishes.slots, self.tiers()
        found = [(kv, memory) for kv in self.formats if (memory := self.tried(tiers[0], kv, context, slots))]
        if not found:
            self.memory(tiers[0], self.formats[-1], context, slots)
        kv, memory = max(found, key=lambda pair: pair[1].max_context)
        tier, goal = tiers[0], self.native if context is None else context
        if self.in_host[tier, kv, memory.max_context, memory.num_slots] is False:
            self.embed = "device"   # better tiers, formats and slots are no reason to move it
        if memory.max_context >= goal:
            enough = [name for name, plan in found if plan.max_context >= goal]
            kv = ([name for name in enough if not KV_FORMATS[name].is_turned] or enough)[-1]
            memory = self.memory(tier, kv, context, slots)
            for better in tiers[1:]:
                if (plan := self.tried(better, kv, context, slots)) and plan.max_context >= goal:
                    tier, memory = better, plan
            for exact in self.formats:
                if (plan := self.tried(tier, exact, context, slots)) and plan.max_context >= goal:
                    kv, memory = exact, plan
                    break
            for count in range(MAX_AUTO_SLOTS, 1, -1) if slots is None else ():
                if (plan := self.tried(tier, kv, goal, count)):
                    memory = plan
                    break
        return tier, kv, memory

    def described(self, tier: str, kv: str, memory: MemoryPlan) -> Plan:
        from q27app.setup.reasons import alternatives, choices, warnings

        plan = Plan(self.machine, self.checkpoint, tier, kv, memory.max_context, memory.num_slots, reserve_of(self.machine),
                    self.in_host[tier, kv, memory.max_context, memory.num_slots], memory, choices(self, tier, kv, memory))
        return Plan(**{**vars(plan), "alternatives": alternatives(self, plan), "warnings": warnings(self, plan)})
