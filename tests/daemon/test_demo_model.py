"""The bundled model through the whole daemon: a tool call and its result, in both tool dialects, with the Anthropic SDK."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import anthropic
import pytest

from q27app.daemon.parts import open_parts
from q27app.daemon.serve import hosting

TOOL = {"name": "get_weather", "description": "Current weather of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


@pytest.mark.parametrize("dialect", ["json", "xml"])
async def test_a_tool_call_and_its_result_go_round(config, dialect):
    model = replace(config.model, path="demo", backend="numpy", template=dialect, context=2048)
    config = replace(config, model=model)
    engine, tokenizer, template = open_parts(config)
    async with hosting(engine, tokenizer, template, config) as (url, _):
        async with asyncio.timeout(300):
            while engine.status().state != "ready":
                await asyncio.sleep(0.02)
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=600.0) as client:
            messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
            asked = await client.messages.create(model="demo", max_tokens=100, messages=messages, tools=[TOOL])
            assert asked.stop_reason == "tool_use"
            call = next(block for block in asked.content if block.type == "tool_use")
            assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps({"temperature": 12, "sky": "cloudy"})}
            messages += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
            told = await client.messages.create(model="demo", max_tokens=100, messages=messages, tools=[TOOL])
    assert (told.stop_reason, told.content[0].text) == ("end_turn", "It is 12 degrees and cloudy in Oslo.")
