"""What the first request of a daemon waits for beside the model: nothing that could have been done before it came."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from q27app.daemon.prepare import practise

SCRIPT = """
import asyncio, json, sys
import aiohttp
from q27app.chat.template import open_template
from q27app.chat.tokenizer import Tokenizer
from q27app.config import Config
from q27app.daemon.app import make_app, make_runner
from q27app.weights.demo_tokenizer import train
from scripted import ScriptedEngine

async def main():
    tokenizer = Tokenizer.from_metadata({"tokenizer.huggingface.json": train([], 265)})
    engine = ScriptedEngine(tokenizer, ("Hello",))
    runner = make_runner(make_app(engine, tokenizer, open_template({}, tokenizer), Config()), shutdown_timeout_s=0.1)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with session.get(url + "/ready"):   # the other side's own imports
            pass
        for _ in range(2400):
            if "q27app.chat.stream" in sys.modules and "msgspec" in sys.modules:
                break
            await asyncio.sleep(0.025)
        await asyncio.sleep(0.3)
        before = set(sys.modules)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        async with session.post(url + "/v1/chat/completions", json=body) as response:
            answer = await response.json()
    print(json.dumps([answer["choices"][0]["message"]["content"], sorted(set(sys.modules) - before)]))
    engine.close()
    await runner.cleanup()

asyncio.run(main())
"""


def test_a_first_request_imports_nothing(tmp_path):
    (tmp_path / "first.py").write_text(SCRIPT)
    environment = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{Path(__file__).parent}", "HOME": str(tmp_path), "Q27APP_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "first.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    content, imported = json.loads(done.stdout)
    assert content and not [name for name in imported if name.split(".")[0] in ("q27app", "msgspec", "jinja2", "llguidance", "tokenizers")], imported


class BrokenTemplate:
    """Renders nothing."""

    dialect = "json"

    def render(self, *args, **kwargs):
        raise ValueError("a template that breaks")


async def test_a_template_that_breaks_keeps_no_daemon_from_starting(start, caplog):
    caplog.set_level("DEBUG", "q27app.daemon")
    running = await start(template=BrokenTemplate())
    practise(running.daemon)
    assert "ahead of the first request" in caplog.text
    status, _ = await running.get("/health")
    assert status == 200
