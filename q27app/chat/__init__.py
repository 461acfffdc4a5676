"""ROOM 5. Messages -> prompt tokens; tokens -> typed deltas. No I/O but tokenizer files. Imports: ground floor.

Start at types.py, then:

    text <-> ids   vocabulary.py (what a tokenizer file says), tok_file.py, tokenizer.py
    prompts        conversation.py (what clients send), prompt.py (scaffold and content), template.py (which rendering),
                   template_official.py, template_json.py, template_jinja.py in template_sandbox.py
    answers        stream.py (the parser), splitter.py (channels), display.py on display_inline.py (examples in prose),
                   tool_body.py (where a wrapped call ends), tool_calls.py (what it says), stops.py
    drifted calls  tool_repair.py (the table), bare_calls.py (calls without a wrapper), tool_json.py, tool_json_tail.py,
                   tool_xml.py
    between steps  guide.py
"""
