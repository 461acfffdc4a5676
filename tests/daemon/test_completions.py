"""Several prompts in one request: each is answered as it would be alone, in order, streamed or not."""

from __future__ import annotations

import json

import pytest


def echo(tokenizer):
    """The answer names the prompt and, where one is set, the seed."""
    return lambda request: [f"<{tokenizer.decode(request.prompt)}:{request.params.seed}>"]


async def test_each_prompt_has_its_answers_in_order(start, tokenizer):
    running = await start(echo(tokenizer), slots=4)
    body = {"prompt": ["ab", tokenizer.encode("xyz")], "n": 2, "seed": 7, "temperature": 1}
    status, reply = await running.post("/v1/completions", body)
    assert status == 200
    wanted = ["<ab:7>", "<ab:8>", "<xyz:7>", "<xyz:8>"]
    assert [choice["text"] for choice in reply["choices"]] == wanted
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == 5 and reply["usage"]["completion_tokens"] == sum(map(len, wanted))

    text = await running.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    chunks = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    streamed = ["", "", "", ""]
    for chunk in chunks[:-1]:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == wanted and chunks[-1]["usage"]["prompt_tokens"] == 5
    assert text.rstrip().endswith("[DONE]")


async def test_the_official_client_sends_several_prompts(start, tokenizer):
    openai = pytest.importorskip("openai")
    running = await start(echo(tokenizer), slots=2)
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=600.0) as client:
        reply = await client.completions.create(model="tiny-1", prompt=["a", "b", "c"])
    assert [choice.text for choice in reply.choices] == ["<a:0>", "<b:0>", "<c:0>"]


@pytest.mark.parametrize("prompt", [[], [[]], ["a", ""], ["a", 3], ["a", [1, "b"]], ["a"] * 65, [["a"]]])
async def test_prompts_that_are_none_are_refused(start, prompt):
    status, reply = await (await start()).post("/v1/completions", {"prompt": prompt})
    assert status == 400 and reply["error"]["param"] == "prompt"


async def test_one_prompt_that_is_too_long_refuses_all(start):
    running = await start(max_context=50)
    status, reply = await running.post("/v1/completions", {"prompt": ["a", "b" * 60]})
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded") and not running.engine.requests
