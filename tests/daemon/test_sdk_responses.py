"""The official OpenAI SDK as oracle of the Responses dialect: its models and its accumulator over a real socket."""

from __future__ import annotations

import json

import pytest

openai = pytest.importorskip("openai", reason="the openai SDK is in the dev extra")

LOOK = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "a \\"b\\""}}\n</tool_call>'
THINKING = {"reasoning": {"effort": "high"}, "extra_body": {"enable_thinking": True}}


@pytest.fixture
async def gpt():
    """gpt(running) -> the SDK's client."""
    clients = []

    def make(running, **options):
        clients.append(
            openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="placeholder", max_retries=0, **{"timeout": 600.0} | options)
        )
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


async def accumulated(client, **given):
    """The final response out of the SDK's own accumulator."""
    async with client.responses.stream(**given) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_response()


async def test_text_whole_and_streamed(start, gpt):
    running = await start(["Hel", 0.25, "lo"])
    client = gpt(running)
    whole = await client.responses.create(model="m", input="hi")
    final = await accumulated(client, model="m", input="hi")
    for response in (whole, final):
        assert (response.output_text, response.status, response.object) == ("Hello", "completed", "response")
        assert response.usage.output_tokens == 5
    assert final.usage.input_tokens_details.cached_tokens == whole.usage.input_tokens - 1
    type(whole).model_validate(whole.model_dump())


async def test_reasoning_calls_and_the_next_turn(start, gpt):
    running = await start(["why ", "not", "</think>\n\n", "I look.\n", CALL, CALL])
    client = gpt(running)
    given = {"model": "m", "input": "hi", "tools": [LOOK], "max_output_tokens": 2000, **THINKING}
    whole = await client.responses.create(**given)
    final = await accumulated(client, **given)
    for response in (whole, final):
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert response.output[0].summary[0].text.strip() == "why not"
        assert [json.loads(item.arguments) for item in response.output[2:]] == [{"path": 'a "b"'}] * 2
        assert response.usage.output_tokens_details.reasoning_tokens > 0
    history = [{"role": "user", "content": "hi"}, *(item.model_dump(exclude_none=True) for item in whole.output)]
    history += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "seen"} for item in whole.output[2:]
    ]
    assert (await client.responses.create(**{**given, "input": history})).status == "completed"


async def test_errors_before_and_after_the_headers(start, gpt):
    running = await start(["a", "b", RuntimeError("broken card")], max_context=400)
    client = gpt(running)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="m", input="x" * 600)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError, match="broken card"):
        await client.responses.create(model="m", input="hi")
    stream = await client.responses.create(model="m", input="hi", stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.failed" and "broken card" in last.response.error.message


async def test_leaving_a_stream_cancels(start, gpt):
    running = await start(["a"] + [0.02, "b"] * 200)
    stream = await gpt(running).responses.create(model="m", input="hi", stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await running.quiet()
    assert len(running.engine.cancels) == 1
