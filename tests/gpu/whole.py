"""The whole program on a card: golden checkpoints, the engine on a constructed 27B, the daemon, many steps, repeated starts.

Each part is a function of (line, attempt) as in `checks.py`; paths of checkpoints come from the environment:
GPU_MODELS, a folder with 27B checkpoints by tier (q4s.q27, ...), GPU_TIER, GPU_SHORT (fp8 KV alone), Q27APP_SHARED, the folder with the oracle, and
GPU_GOLDEN, names of its checkpoints if not all.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from q27app.engine.engine import Engine, EngineConfig
from q27app.engine.request import FinishReason, Request, SamplingParams

PROMPT, CHAIN = (1000, 1001, 1002), 512
CACHE = Path(tempfile.gettempdir()) / "q27app-kernels"


def models() -> Path:
    return Path(os.environ.get("GPU_MODELS", "/tmp/27b"))


def used_mib() -> int:
    """Device memory in use by everybody on the first card that this process may see."""
    return asked("memory.used")


def asked(field: str) -> int:
    """MiB, as nvidia-smi says."""
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "-i", card, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True).stdout.split()[0])


def wait_for_memory(mib: int, seconds: float) -> str:
    """Wait until so much of the card is free; what is. Raises AssertionError that names who holds the rest, after so many seconds."""
    until = time.monotonic() + seconds
    while (free := asked("memory.free")) < mib and time.monotonic() < until:
        time.sleep(0.2)
    if free < mib:
        raise AssertionError(f"{free} MiB of the card are free, {mib} are needed; {holders() or 'no process that may be seen holds any'}")
    return f"{free} MiB"


def holders() -> str:
    """Who has memory of the card: process, MiB, command line."""
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "-i", card, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    found = []
    for row in subprocess.run(command, capture_output=True, text=True).stdout.split("\n"):
        pid, _, used = row.partition(",")
        if pid.strip().isdigit():
            try:
                words = Path(f"/proc/{pid.strip()}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                words = "of another user or machine"
            found.append(f"process {pid.strip()}: {used.strip()} MiB, {words.strip()[:120]}")
    return "; ".join(found)


def taken(plan: dict, before: int, used: int) -> str:
    """What this process took, against the plan; before, used: MiB in use by everybody before it began and now."""
    planned = plan["held"] / 2**20
    return f"taken {used - before} MiB of {planned:.0f} planned ({(used - before) / planned - 1:+.2%}), {plan['runtime'] / 2**20:.0f} of them by the context"


def open_engine(path: Path, **options) -> tuple[Engine, float]:
    """A ready engine and the seconds it took."""
    engine = Engine(EngineConfig(model=path, backend="cuda", **options))
    started = time.monotonic()
    engine.start()
    while (status := engine.status()).state in ("loading", "unloaded"):
        time.sleep(0.02)
    if status.state != "ready":
        engine.close()
        raise status.error or AssertionError(f"the engine is {status.state}")
    seconds = time.monotonic() - started
    print(f"{'a start':<34} {status.model['start']}", flush=True)
    return engine, seconds


def answer(engine: Engine, prompt, count: int, name: str = "r", times: list[float] | None = None, **params):
    """(tokens, final event) of one request. times: when each event came."""
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    engine.submit(Request(name, tuple(prompt), SamplingParams(max_tokens=count, ignore_eos=True, **params)),
                  lambda event: inbox.put((time.perf_counter(), event)))
    tokens: list[int] = []
    while True:
        moment, event = inbox.get(timeout=120)
        tokens += event.tokens
        if times is not None:
            times.append(moment)
        if event.finish is not None:
            if event.finish is FinishReason.ERROR:
                raise event.error
            return tokens, event


def chain_of(path: Path, kv: str, draft: str = "off", **options) -> str:
    """The successor chain of a constructed checkpoint, exactly; load and decode speed, memory against the plan."""
    before = used_mib()
    engine, seconds = open_engine(path, kv_format=kv, draft=draft, **options)
    try:
        ready = used_mib()
        times: list[float] = []
        tokens, event = answer(engine, PROMPT, CHAIN, times=times)
        gaps = 1e3 * np.diff(times)
        expected = [PROMPT[-1] + 1 + i for i in range(CHAIN)]
        wrong = next((i for i, (a, b) in enumerate(zip(tokens, expected)) if a != b), None)
        stats, after = event.stats, used_mib()
        _, long = answer(engine, (1000 + i % 1000 for i in range(2048)), 2, "long")
        plan = engine.status().plan
        text = (f"ready {seconds:.1f} s, {path.stat().st_size / 1e9 / seconds:.2f} GB/s; decode {1000 * (len(tokens) - 1) / max(stats.decode_ms, 1e-9):.1f} tok/s in {stats.num_steps} steps"
                f" (between them {np.median(gaps):.3f} ms in the median, {gaps.max():.1f} at most)"
                f"; prefill of 2,048 {2048000 / long.stats.prefill_ms:.0f} tok/s; used MiB {before} -> {ready} -> {after} -> {used_mib()}; {taken(plan, before, ready)}"
                f" (weights {plan['weights'] / 2**20:.0f}, scratch {plan['scratch'] / 2**20:.0f}, slots {plan['num_slots']} x {plan['slot_bytes'] / 2**20:.0f}, blocks {plan['num_blocks'] * plan['block_bytes'] / 2**20:.0f})")
        if wrong is not None or len(tokens) != CHAIN:
            raise AssertionError(f"token {wrong} is {tokens[wrong] if wrong is not None else None}, expected "
                                 f"{expected[wrong] if wrong is not None else len(tokens)}: {tokens[:12]}; {text}")
        return f"{CHAIN} tokens right; {text}"
    finally:
        engine.close()


def chain(line, attempt) -> None:
    """512 greedy tokens on fp16 and fp8 KV, without and with drafts."""
    path = models() / f"{os.environ.get('GPU_TIER', 'q4s')}.q27"
    for kv in ("fp8",) if "GPU_SHORT" in os.environ else ("fp16", "fp8"):
        for draft in ("off", "auto"):
            attempt(f"chain {path.stem} {kv}, draft {draft}", lambda kv=kv, draft=draft: chain_of(path, kv, draft, context=16384, slots=1))


def played(line, attempt) -> None:
    """As what $Q27APP_FORCE_ARCH and $Q27APP_MEMORY_CAP say, or as it is: the chain at fp16 without drafts, to compare."""
    from q27app.config import played_card

    arch, cap = played_card()
    line("plays", f"{arch}, {cap}")
    path = models() / "q4s.q27"
    attempt(f"chain q4s fp16, {'played' if arch else 'native'}", lambda: chain_of(path, "fp16", "off", context=16384, slots=1))


def golden(line, attempt) -> None:
    """The oracle's checkpoints at F16: logits, greedy tokens where the margin is wide, drafts."""
    from q27app.kernels.cuda_backend import CudaBackend
    from q27app.weights.convert import convert
    from tests.kernels.made import relative_error
    from tests.model.runs import Run

    shared = Path(os.environ["Q27APP_SHARED"]) / "oracle"
    tied = ["--lin-k-heads", "2", "--lin-v-heads", "2", "--heads", "8", "--kv-heads", "2", "--tied"]

    def check(name: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            source = shared / "golden" / f"{name}.gguf"
            if not name.startswith("small"):
                source = Path(folder) / "hf"
                subprocess.run([sys.executable, str(shared / "make_tiny_hf.py"), str(source), *(tied if "tied" in name else [])], check=True, capture_output=True)
            convert(source, Path(folder) / "model.q27", tier="f16")
            values = np.load(shared / "golden" / f"{name}.npz")
            backend = CudaBackend.open(CACHE)
            try:
                run = Run(Path(folder) / "model.q27", kv_format="fp16", backend=backend)
                logits = run.feed(values["tokens"])
                errors = {"prompt": relative_error(logits, values["logits"])}
                top = np.sort(values["logits"], axis=-1)
                sure = top[:, -1] - top[:, -2] > 0.05
                equal = (logits.argmax(-1) == values["logits"].argmax(-1))[sure]
                rows = np.stack([run.feed([int(token)], phase="decode")[0] for token in values["greedy"]])
                errors["greedy"] = relative_error(rows, values["greedy_logits"])
                worst = max(errors.values())
                if worst > 2e-3 or not equal.all():
                    raise AssertionError(f"{errors}, {(~equal).sum()} of {len(equal)} sure rows have another argmax")
                return f"logits {errors['prompt']:.1e}, greedy {errors['greedy']:.1e}, {len(equal)} sure rows equal"
            finally:
                backend.close()

    for name in os.environ.get("GPU_GOLDEN", "default equal-heads-tied small-r3 small-equal").split():
        attempt(f"golden {name} F16", lambda name=name: check(name))


def nano(folder: str, wiring: str = "chain") -> Path:
    from q27app.weights.synthetic import synthesize

    return synthesize(Path(folder) / f"{wiring}.q27", "nano", wiring, "q4s")


def steps(line, attempt) -> None:
    """1,000 steps, and 20 starts and stops, without growth in device memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = nano(folder)

        def thousand() -> str:
            engine, seconds = open_engine(path, draft="off", context=4096, slots=1)
            try:
                answer(engine, PROMPT, 8)
                first = used_mib()
                _, event = answer(engine, PROMPT, 1000)
                after = used_mib()
                assert after == first, f"{first} MiB before, {after} MiB after"
                return f"{event.stats.num_steps} steps, {first} MiB before and after, ready in {seconds:.1f} s, {event.stats.decode_ms / 1000:.2f} ms a step"
            finally:
                engine.close()

        def starts() -> str:
            seen = []
            for _ in range(20):
                engine, _ = open_engine(path, context=2048, slots=1)
                tokens, _ = answer(engine, PROMPT, 8)
                assert tokens == [1003 + i for i in range(8)], tokens
                engine.close()
                seen.append(used_mib())
            assert max(seen[2:]) <= min(seen[2:]), f"MiB after each stop: {seen}"
            return f"MiB after each stop: {seen}"

        attempt("1,000 steps", thousand)
        attempt("20 starts and stops", starts)


def daemon(line, attempt) -> None:
    """`q27app serve` on the 27B: time to /ready, a streamed answer, memory against the plan."""
    path = models() / "q4s.q27"

    def run() -> str:
        log = Path(tempfile.gettempdir()) / "q27app-gpu-daemon.log"
        port, before, started = 18027, used_mib(), time.monotonic()
        environment = {**os.environ, "Q27APP_HOME": str(Path(tempfile.gettempdir()) / "q27app-gpu-home")}
        with log.open("wb") as file:
            process = subprocess.Popen([sys.executable, "-m", "q27app", "serve", "--model", str(path), "--port", str(port), "--backend", "cuda", "--ctx", "32768", "--verify-weights"],
                                       stdout=file, stderr=file, env=environment)
        try:
            seconds = wait_ready(process, port, started, log)
            ready = used_mib()
            text, first, total = stream(port, {"model": "x", "prompt": list(PROMPT), "max_tokens": 64, "stream": True})
            status = json.loads(get(port, "/status")[1])
            health, verified = get(port, "/health?verify=1")
            assert health == 200 and json.loads(verified)["weights"]["equal"] is True, verified
            plan = status["engine"]["plan"]
            after = used_mib()
            grown = after - ready
            assert " t1003 t1004 t1005" in text, f"{text[:200]!r}"
            return (f"ready in {seconds:.1f} s ({path.stat().st_size / 1e9 / seconds:.2f} GB/s), first text after {first * 1000:.0f} ms, {total:.2f} s for 64 tokens; MiB {before} -> {ready}, "
                    f"{taken(plan, before, ready)}, grown {grown}; weights compared in {json.loads(verified)['weights']['seconds']} s; context {plan['max_context']} x {plan['num_slots']} slots; reasons {plan['reasons']}")
        finally:
            process.send_signal(signal.SIGTERM)
            line("exit code", str(process.wait(60)))
            line("log", log.read_text(errors="replace")[-3000:])

    attempt("daemon, 27B q4s", run)


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def wait_ready(process: subprocess.Popen, port: int, started: float, log: Path) -> float:
    while process.poll() is None and time.monotonic() - started < 180:
        try:
            if get(port, "/ready")[0] == 200:
                return time.monotonic() - started
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"not ready after {time.monotonic() - started:.0f} s, exit code {process.poll()}")


def stream(port: int, body: dict) -> tuple[str, float, float]:
    """(text, seconds to the first of it, seconds in all) of a streamed completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    started, first, text = time.monotonic(), 0.0, ""
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read(500)
    for raw in response:
        if raw.startswith(b"data: {"):
            for choice in json.loads(raw[6:]).get("choices", []):
                text += choice.get("text", "")
                first = first or time.monotonic() - started
    connection.close()
    return text, first, time.monotonic() - started


def refusals(line, attempt) -> None:
    """A failing kernel ends requests cleanly; a model that does not fit is a table; a foreign cubin is not used."""
    from q27app.errors import EngineDied
    from q27app.kernels.cuda_backend import CudaBackend

    def sticky() -> str:
        with tempfile.TemporaryDirectory() as folder:
            before = used_mib()
            engine, _ = open_engine(nano(folder), context=2048, slots=2)
            alive = used_mib()
            assert answer(engine, PROMPT, 4)[0] == [1003, 1004, 1005, 1006]
            object.__setattr__(engine._loaded.model.weights.embed, "address", 1 << 45)   # every pass reads there
            try:
                answer(engine, PROMPT, 400, "sticky")
            except EngineDied as error:
                status = engine.status()
                assert status.state == "failed" and "CUDA error" in str(status.error), status.error
                engine.close()
                return (f"request: {type(error).__name__}; health: {str(status.error)[:120]}; exit code {error.exit_code}; "
                        f"MiB before, with, and after it {before}, {alive}, {used_mib()}")
            raise AssertionError("the request went on")

    def no_memory() -> str:
        environment = {**os.environ, "Q27APP_MEMORY_CAP": "9000000000"}
        done = subprocess.run([sys.executable, "-m", "q27app", "generate", "--model", str(models() / "q4s.q27"), "--tokens", "1000", "--backend", "cuda"],
                              capture_output=True, text=True, env=environment)
        assert done.returncode == 5 and "KV cache" in done.stderr and "Traceback" not in done.stderr, (done.returncode, done.stderr[-2000:])
        return f"exit code 5: {done.stderr.splitlines()[0][:120]}"

    def foreign() -> str:
        with tempfile.TemporaryDirectory() as folder:
            from q27app.kernels.card import card_of
            from q27app.kernels.compiler import Compiler, Job

            job = Job.of("accept", {})
            other = Compiler(Path(folder), card_of("86").target).get(job)
            backend = CudaBackend.open(Path(folder))
            path = backend.device.compiler.path(job)
            own = path.read_bytes()
            path.write_bytes(other)
            backend.close()
            backend = CudaBackend.open(Path(folder))
            backend.device.module(job)
            again = path.read_bytes()
            backend.close()
            assert own == again != other
            return "a cubin of another card in the cache was compiled again"

    attempt("not enough memory", no_memory)
    attempt("a cubin of another card", foreign)
    attempt("a failing kernel", sticky)   # last: nothing runs in this process after it


PARTS = {"refusals": refusals, "golden": golden, "chain": chain, "played": played, "steps": steps, "daemon": daemon}
