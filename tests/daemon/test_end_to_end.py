"""The whole path, socket to arithmetic and back: the real engine on a constructed checkpoint, without a GPU."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from q27app.daemon.parts import open_parts
from q27app.daemon.serve import run
from q27app.weights.synthetic import synthesize

anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is in the dev extra")
openai = pytest.importorskip("openai", reason="the openai SDK is in the dev extra")

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    """A checkpoint in which token t is followed by t + 1."""
    return synthesize(tmp_path_factory.mktemp("nano") / "nano.q27", "nano", "chain", "q8")


@pytest.fixture
async def serving(nano, config):
    """(base URL, engine) of a daemon that is ready."""
    config = replace(config, model=replace(config.model, path=str(nano), backend="numpy", context=1024, slots=2))
    engine, tokenizer, template = open_parts(config)
    announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run(engine, tokenizer, template, config, announced.set_result))
    await asyncio.wait([announced, task], return_when=asyncio.FIRST_COMPLETED)
    async with asyncio.timeout(120):
        while engine.status().state != "ready":
            assert not task.done(), task.exception()
            await asyncio.sleep(0.02)
    yield announced.result(), engine
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_both_sdks_read_the_same_answer_streamed_and_whole(serving):
    url, _ = serving
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0, timeout=600.0) as gpt:
        chain = await gpt.completions.create(model="nano", prompt=[1000, 1001, 1002], max_tokens=8)
        assert chain.choices[0].text == " t1003 t1004 t1005 t1006 t1007 t1008 t1009 t1010"
        assert (chain.usage.prompt_tokens, chain.usage.completion_tokens) == (3, 8)
        whole = await gpt.chat.completions.create(model="nano", messages=MESSAGES, max_tokens=24, logprobs=True)
        stream = await gpt.chat.completions.create(model="nano", messages=MESSAGES, max_tokens=24, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == whole.choices[0].message.content != ""
        assert whole.choices[0].finish_reason == "length"
        assert whole.choices[0].logprobs.content[0].logprob <= 0
    async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0, timeout=600.0) as claude:
        message = await claude.messages.create(model="nano", messages=MESSAGES, max_tokens=24)
        async with claude.messages.stream(model="nano", messages=MESSAGES, max_tokens=24) as stream:
            final = await stream.get_final_message()
        assert message.content[0].text == final.content[0].text == whole.choices[0].message.content
        assert final.stop_reason == "max_tokens" and final.usage.output_tokens == whole.usage.completion_tokens
        count = await claude.messages.count_tokens(model="nano", messages=MESSAGES)
        usage = final.usage
        assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: .* > 1023 maximum"):
            await claude.messages.create(
                model="nano", max_tokens=1, messages=[{"role": "user", "content": "é" * 1100}]
            )


async def test_a_client_that_leaves_frees_its_slot(serving):
    url, engine = serving
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0, timeout=600.0) as gpt:
        stream = await gpt.completions.create(model="nano", prompt=[1000], max_tokens=1000, stream=True)
        async for _ in stream:
            break
        await stream.close()
    async with asyncio.timeout(120):
        while engine.status().running:
            await asyncio.sleep(0.01)
    assert engine.status().counters["cancels"] == 1


async def test_masks_of_a_form_hold_in_the_real_engine(serving):
    """The model wants to count; drafts and draws keep to the schema and to the required call all the same."""
    pytest.importorskip("llguidance", reason="llguidance is in the extra json")
    url, _ = serving
    properties = {"ok": {"type": "boolean"}, "kind": {"enum": ["file", "folder"]}}
    schema = {"type": "object", "properties": properties, "required": ["ok", "kind"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0, timeout=600.0) as gpt:
        given = {"model": "nano", "messages": MESSAGES, "max_tokens": 500}
        for temperature in (0, 1):
            reply = await gpt.chat.completions.create(
                **given, response_format=form, n=2, temperature=temperature, seed=7
            )
            for choice in reply.choices:
                answer = json.loads(choice.message.content)
                assert isinstance(answer["ok"], bool) and answer["kind"] in ("file", "folder") and len(answer) == 2
                assert choice.finish_reason == "stop"
            called = await gpt.chat.completions.create(
                **given, tools=[tool], tool_choice="required", parallel_tool_calls=False, temperature=temperature
            )
            call = called.choices[0].message.tool_calls[0].function
            assert (call.name, called.choices[0].finish_reason) == ("look", "tool_calls")
            assert json.loads(call.arguments)["kind"] in ("file", "folder")
