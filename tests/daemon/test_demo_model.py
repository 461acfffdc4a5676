"""The bundled model through the whole daemon: tool calls and their results, in both tool dialects, with the vendors' SDKs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anthropic
import openai
import pytest

from q27app.config import Config
from q27app.daemon.parts import open_parts
from q27app.daemon.serve import hosting

TOOL = {"name": "get_weather", "description": "Current weather of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


def _tool(name: str, description: str, **types: str) -> dict:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in types.items()}, "required": list(types)}
    return {"name": name, "description": description, "input_schema": schema}


RESERVED = "Reserve at Storm: 819 guests, Monday."
"""Only `guests` tells the tool, so the model looks it up in lines of text before it calls (training/README.md)."""
LINES = """Which tool takes guests?
inspect_orchard: height, price
measure_humidity: station
book_table: evening, guests"""
CALLED = ("book_table", {"evening": "Monday", "guests": 819, "restaurant": "Storm"})
DECLARED = [_tool("inspect_orchard", "Inspects an orchard", height="string", price="string"),
            _tool("measure_humidity", "Humidity of a station", station="string"),
            _tool("book_table", "Book a table at a restaurant", restaurant="string", guests="integer", evening="string")]
RESULT, TOLD = json.dumps({"status": "confirmed"}), "The status is confirmed."


@asynccontextmanager
async def served(config: Config, dialect: str) -> AsyncIterator[str]:
    """The address of a daemon with the bundled model."""
    model = replace(config.model, path="demo", backend="numpy", template=dialect, context=2048)
    config = replace(config, model=model)
    engine, tokenizer, template = open_parts(config)
    async with hosting(engine, tokenizer, template, config) as (url, _):
        async with asyncio.timeout(300):
            while engine.status().state != "ready":
                await asyncio.sleep(0.02)
        yield url


@pytest.mark.parametrize("dialect", ["json", "xml"])
async def test_a_tool_call_and_its_result_go_round(config, dialect):
    async with (served(config, dialect) as url,
                anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=600.0) as client):
        messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
        asked = await client.messages.create(model="demo", max_tokens=100, messages=messages, tools=[TOOL])
        assert asked.stop_reason == "tool_use"
        call = next(block for block in asked.content if block.type == "tool_use")
        assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps({"temperature": 12, "sky": "cloudy"})}
        messages += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
        told = await client.messages.create(model="demo", max_tokens=100, messages=messages, tools=[TOOL])
    assert (told.stop_reason, told.content[0].text) == ("end_turn", "It is 12 degrees and cloudy in Oslo.")


async def _looked_up_with_messages(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=600.0) as client:
        messages = [{"role": "user", "content": RESERVED}]
        asked = await client.messages.create(model="demo", max_tokens=200, messages=messages, tools=DECLARED)
        assert (asked.stop_reason, [block.type for block in asked.content]) == ("tool_use", ["text", "tool_use"])
        text, call = asked.content
        assert (text.text.strip(), (call.name, call.input)) == (LINES, CALLED)
        messages += [{"role": "assistant", "content": asked.content},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]}]
        told = await client.messages.create(model="demo", max_tokens=100, messages=messages, tools=DECLARED)
        assert (told.stop_reason, told.content[0].text) == ("end_turn", TOLD)


async def _looked_up_with_completions(client: openai.AsyncOpenAI) -> None:
    tools = [{"type": "function", "function": {"name": tool["name"], "description": tool["description"],
                                               "parameters": tool["input_schema"]}} for tool in DECLARED]
    messages = [{"role": "user", "content": RESERVED}]
    asked = (await client.chat.completions.create(model="demo", max_tokens=200, messages=messages, tools=tools)).choices[0]
    assert (asked.finish_reason, asked.message.content.strip()) == ("tool_calls", LINES)
    call, = asked.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == CALLED
    messages += [asked.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    told = (await client.chat.completions.create(model="demo", max_tokens=100, messages=messages, tools=tools)).choices[0]
    assert (told.finish_reason, told.message.content) == ("stop", TOLD)


async def _looked_up_with_responses(client: openai.AsyncOpenAI) -> None:
    tools = [{"type": "function", "name": tool["name"], "description": tool["description"],
              "parameters": tool["input_schema"], "strict": False} for tool in DECLARED]
    given = [{"role": "user", "content": RESERVED}]
    asked = await client.responses.create(model="demo", max_output_tokens=200, input=given, tools=tools)
    assert [item.type for item in asked.output] == ["message", "function_call"]
    call = asked.output[1]
    assert (asked.output_text.strip(), (call.name, json.loads(call.arguments))) == (LINES, CALLED)
    given += [item.model_dump(exclude_none=True) for item in asked.output]
    given.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
    told = await client.responses.create(model="demo", max_output_tokens=100, input=given, tools=tools)
    assert told.output_text == TOLD


@pytest.mark.parametrize("dialect", ["json", "xml"])
async def test_a_tool_is_looked_up_in_text_in_front_of_its_call_by_every_protocol(config, dialect):
    async with (served(config, dialect) as url,
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600.0) as client):
        await _looked_up_with_messages(url)
        await _looked_up_with_completions(client)
        await _looked_up_with_responses(client)


@pytest.mark.parametrize("dialect", ["json", "xml"])
async def test_a_forced_call_has_the_arguments_that_an_own_one_has(config, dialect):
    """Declared in another order than the template prints and the model learnt; see grammar.as_printed."""
    request = {"model": "demo", "max_tokens": 200, "messages": [{"role": "user", "content": "Book a table at Milk for 59 guests on Friday."}],
               "tools": DECLARED[::-1]}
    async with (served(config, dialect) as url,
                anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=600.0) as client):
        for choice in ("auto", "any"):
            found = await client.messages.create(**request, tool_choice={"type": choice})
            call, = (block for block in found.content if block.type == "tool_use")
            assert (call.name, call.input) == ("book_table", {"evening": "Friday", "guests": 59, "restaurant": "Milk"}), choice
