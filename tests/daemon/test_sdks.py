"""The official SDKs as oracles: their accumulators over a real socket."""

from __future__ import annotations

import asyncio
import json

import pytest

anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is in the dev extra")
openai = pytest.importorskip("openai", reason="the openai SDK is in the dev extra")

MESSAGES = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "a \\"b\\""}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
ANTHROPIC_TOOL = {"name": "look", "description": "looks", "input_schema": SCHEMA}
OPENAI_TOOL = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": SCHEMA}}
THINKING = ["why ", "not", "</think>\n\n", "I look.\n", CALL, CALL]


@pytest.fixture
async def claude():
    """claude(running) -> the SDK's client."""
    clients = []

    def make(running, **options):
        clients.append(
            anthropic.AsyncAnthropic(base_url=running.url, api_key="placeholder", max_retries=0, **{"timeout": 600.0} | options)
        )
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


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


async def test_anthropic_text(start, claude):
    running = await start(["Hel", 0.02, "lo"])
    client = claude(running)
    whole = await client.messages.create(model="m", max_tokens=50, messages=MESSAGES)
    async with client.messages.stream(model="m", max_tokens=50, messages=MESSAGES) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert whole.content[0].text == text == final.content[0].text == "Hello"
    assert final.stop_reason == whole.stop_reason == "end_turn"
    prompt = len(running.engine.requests[0].prompt)
    for usage in (whole.usage, final.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == prompt
        assert usage.output_tokens == 5
    assert final.usage.cache_read_input_tokens == prompt - 1


async def test_anthropic_thinking_and_calls(start, claude):
    running = await start(THINKING)
    given = {
        "model": "m",
        "max_tokens": 2000,
        "messages": MESSAGES,
        "tools": [ANTHROPIC_TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    client = claude(running)
    whole = await client.messages.create(**given)
    async with client.messages.stream(**given) as stream:
        final = await stream.get_final_message()
    for message in (whole, final):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert message.content[0].thinking.strip() == "why not" and message.content[0].signature
        assert message.content[1].text.strip() == "I look."
        assert [block.input for block in message.content[2:]] == [{"path": 'a "b"'}] * 2
        assert message.stop_reason == "tool_use"
    history = [
        *MESSAGES,
        {"role": "assistant", "content": final.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": block.id, "content": "seen"} for block in final.content[2:]
            ],
        },
    ]
    assert (await client.messages.create(**{**given, "messages": history})).type == "message"


async def test_anthropic_counts_lists_and_errors(start, claude):
    running = await start(["x"], max_context=200)
    client = claude(running)
    count = await client.messages.count_tokens(model="m", messages=MESSAGES)
    whole = await client.messages.create(model="m", max_tokens=1, messages=MESSAGES)
    assert count.input_tokens == whole.usage.input_tokens
    assert [model.id async for model in client.models.list()] == ["tiny-1"]
    assert (await client.models.retrieve("any")).id == "any"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: .* tokens > 199 maximum"):
        await client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "x" * 300}])
    running.engine.state.state = "loading"
    with pytest.raises(anthropic.APIStatusError) as caught:
        await client.messages.create(model="m", max_tokens=1, messages=MESSAGES)
    assert caught.value.status_code == 503


async def test_anthropic_sees_a_failure_in_mid_stream(start, claude):
    running = await start(["a", "b", RuntimeError("broken card")])
    with pytest.raises(anthropic.APIError, match="broken card"):
        async with claude(running).messages.stream(model="m", max_tokens=50, messages=MESSAGES) as stream:
            await stream.get_final_message()


async def test_openai_text(start, gpt):
    running = await start(["Hel", 0.02, "lo"])
    client = gpt(running)
    whole = await client.chat.completions.create(model="m", messages=MESSAGES, logprobs=True, top_logprobs=1)
    assert whole.choices[0].message.content == "Hello" and whole.choices[0].finish_reason == "stop"
    assert "".join(entry.token for entry in whole.choices[0].logprobs.content) == "Hello"
    stream = await client.chat.completions.create(
        model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == chunks[-1].usage.prompt_tokens - 1


async def test_openai_reasoning_and_calls(start, gpt):
    running = await start(THINKING)
    given = {
        "model": "m",
        "messages": MESSAGES,
        "tools": [OPENAI_TOOL],
        "max_tokens": 2000,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    client = gpt(running)
    whole = await client.chat.completions.create(**given)
    async with client.chat.completions.stream(**given) as stream:
        final = await stream.get_final_completion()
    for completion in (whole, final):
        message = completion.choices[0].message
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"path": 'a "b"'}] * 2
        assert message.content.strip() == "I look."
        assert completion.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.reasoning_content.strip() == "why not"
    history = [
        *MESSAGES,
        whole.choices[0].message.model_dump(exclude_none=True),
        *(
            {"role": "tool", "tool_call_id": call.id, "content": "seen"}
            for call in whole.choices[0].message.tool_calls
        ),
    ]
    assert (await client.chat.completions.create(**{**given, "messages": history})).object == "chat.completion"


async def test_openai_completions_lists_and_errors(start, gpt):
    running = await start(["ab"], max_context=200)
    client = gpt(running)
    assert (await client.completions.create(model="m", prompt="x")).choices[0].text == "ab"
    stream = await client.completions.create(model="m", prompt="x", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "ab"
    assert [model.id async for model in client.models.list()] == ["tiny-1"]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 300}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="m", messages=MESSAGES, n=99)
    assert caught.value.param == "n"


async def test_openai_sees_a_failure_in_mid_stream(start, gpt):
    running = await start(["a", "b", RuntimeError("broken card")])
    stream = await gpt(running).chat.completions.create(model="m", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="broken card"):
        [chunk async for chunk in stream]


async def test_leaving_a_stream_or_timing_out_cancels(start, claude, gpt):
    running = await start(["a"] + [0.1, "b"] * 499)
    async with claude(running).messages.stream(model="m", max_tokens=500, messages=MESSAGES) as stream:
        async for _ in stream.text_stream:
            break
    await running.quiet()
    while len(running.engine.requests) < 2:   # on a machine that is taken it is over before it has begun
        with pytest.raises(openai.APITimeoutError):
            await gpt(running, timeout=0.3).chat.completions.create(model="m", messages=MESSAGES)
        await running.quiet()
    assert running.engine.cancels == [request.id for request in running.engine.requests]


async def test_many_counts_during_a_generation_harm_nobody(start, claude):
    running = await start(["a"] + [0.01, "b"] * 30)
    client = claude(running)
    answer = asyncio.create_task(client.messages.create(model="m", max_tokens=500, messages=MESSAGES))
    counts = await asyncio.gather(*(client.messages.count_tokens(model="m", messages=MESSAGES) for _ in range(50)))
    assert len({count.input_tokens for count in counts}) == 1
    assert (await answer).content[0].text == "a" + "b" * 30


async def test_keys_of_both_kinds_open_the_door(start, claude, gpt, with_server):
    running = await start(config=with_server(api_keys=("placeholder",)))
    assert (await claude(running).messages.create(model="m", max_tokens=5, messages=MESSAGES)).content
    assert (await gpt(running).chat.completions.create(model="m", messages=MESSAGES)).choices
    stranger = anthropic.AsyncAnthropic(base_url=running.url, api_key="other", max_retries=0, timeout=600.0)
    with pytest.raises(anthropic.AuthenticationError):
        await stranger.messages.create(model="m", max_tokens=5, messages=MESSAGES)
    await stranger.close()
