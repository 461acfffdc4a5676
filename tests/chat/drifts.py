"""Hand-made answers: calls with every known deviation, and what must come of them."""

from __future__ import annotations

from tests.chat.messages import make_tool

TOOLS = (
    make_tool("ReadFile", required=("path",), path="string", limit="string"),
    make_tool("WriteFile", required=("path", "body"), path="string", body="string"),
    make_tool("Shell", required=("cmd",), cmd="string", note="string"),
    make_tool("AddTask", required=("title",), title="string", detail="string"),
)

LS, READ, WRITE = ("Shell", {"cmd": "ls"}), ("ReadFile", {"path": "a"}), ("WriteFile", {"path": "a", "body": "b"})


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


CMD, PATH = parameter("cmd", "ls"), parameter("path", "a")
WHOLE = "recovered"
AT_END = "at the end"

DRIFTED: dict[str, tuple[str, list[tuple], str, str]] = {
    "1": ('{"name": "Shell", "arguments": {"cmd": "ls"}}', [LS], "bare_json", WHOLE),
    "2": ('{"name": "WriteFile", "arguments": {"path": "a", "body": "b"', [WRITE], "cut_json", AT_END),
    "2 file": ('{"name": "WriteFile", "arguments": {"path": "a", "body": "b"}\n</file>', [WRITE], "cut_json", AT_END),
    "3 raw": (
        '{"name": "WriteFile", "arguments": {"body": <content>s = "q";\n</content>, "path": "a"}}',
        [("WriteFile", {"body": 's = "q";\n', "path": "a"})], "content_tags", WHOLE,
    ),
    "3 quote": (
        '{"name": "WriteFile", "arguments": {"body": "s = "q";\n</content>, "path": "a"}}',
        [("WriteFile", {"body": 's = "q";\n', "path": "a"})], "content_tags", WHOLE,
    ),
    "4": (
        '{"tool_call":\n{"name": "Shell", "arguments": {"cmd": "ls"}}\n</tool_call>\n{"tool_call":\n'
        '{"name": "ReadFile", "arguments": {"path": "a"}}}', [LS, READ], "keyed_wrapper", WHOLE,
    ),
    "5": ('{"name": "Shell", "arguments": {"cmd": "a\nb\tc"}}', [("Shell", {"cmd": "a\nb\tc"})], "raw_controls", WHOLE),
    "6": ('{"name":\n{"path": "a"}}', [READ], "no_name", WHOLE),
    "6 batch": ('{"name":\n{"path": "a"}\n{"name":\n{"cmd": "ls"}\n', [READ, LS], "no_name", WHOLE),
    "7": ('{"name":\n{"function":{"cmd":"ls"}}', [LS], "no_name_shelled", WHOLE),
    "8": ('{"function": "Shell", "arguments": {"cmd": "ls"}}', [LS], "alias_key", WHOLE),
    "8 siblings": ('{"tool": "Shell", "cmd": "ls"}', [LS], "alias_key", WHOLE),
    "8 batch": ('{"name":\n{"function":"ReadFile","path":"a"}\n{"tool_name":"Shell","cmd":"ls"}\n', [READ, LS], "alias_key", WHOLE),
    "flat": ('{"name": "Shell", "cmd": "ls"}', [LS], "flat", WHOLE),
    "9": ('{"name":"Shell",\narguments":{"cmd":"ls"}}', [LS], "unquoted_key", WHOLE),
    "10": ('Shell", "cmd": "ls"}', [LS], "no_head", WHOLE),
    "10 batch": ('Shell", "cmd": "ls"}\nReadFile", "path": "a"}', [LS, READ], "no_head", WHOLE),
    "11": (
        '{"name": "WriteFile", "arguments": {"body": "import "fmt"\nx := []string{"a","b"}\n", "path": "m.go"}}',
        [("WriteFile", {"body": 'import "fmt"\nx := []string{"a","b"}\n', "path": "m.go"})], "raw_quotes", AT_END,
    ),
    "12": ('{"name": Shell, "arguments": {"cmd": "ls"}}', [LS], "unquoted_name", WHOLE),
    "12 quote": ('{"name": Shell", "arguments": {"cmd": "ls"}}', [LS], "unquoted_name", WHOLE),
    "14": (
        "<tool_name>ReadFile</tool_name>\n<parameter=path>a</parameter>\n<tool_name>Shell\n</tool_name>\n"
        '<parameter=arguments>\n{"cmd":"ls"}}', [READ, LS], "tool_name", WHOLE,
    ),
    "15": ('<name>Shell, "arguments": {"cmd":"ls"}}', [LS], "pseudo_tag", WHOLE),
    "15 equals": ('<name="Shell", "arguments": {"cmd":"ls"}}', [LS], "pseudo_tag", WHOLE),
    "16": ('<function>\n{"name": "Shell", "arguments": {"cmd": "ls"}}\n</function>', [LS], "json_in_function", WHOLE),
    "16 open": ('<function>\n{"name": "Shell", "arguments": {"cmd": "ls"}}', [LS], "json_in_function", WHOLE),
    "17b": ('{"name": "Shell",\n' + CMD, [LS], "json_head", WHOLE),
    "18": (f"<name>Shell\n</parameter>\n{CMD}</function>", [LS], "name_tag", WHOLE),
    "19": ('<function name="Shell">\n<parameter name="cmd">ls</parameter>\n</function>', [LS], "spelling", WHOLE),
    "19 quote": (f'<function name="Shell>\n{CMD}</function>', [LS], "spelling", WHOLE),
    "17 placeholder": (f"<function=name>\nShell\n{CMD}</function>", [LS], "bare_function", WHOLE),
    "20": (f"<tool_calls>\n<tool_name>\n{PATH}</function>\n<tool>\n<tool_name>\n{CMD}</function>", [READ, LS], "nameless", WHOLE),
    "21": (f"{PATH}{parameter('body', 'b')}</function>", [WRITE], "no_opener", WHOLE),
    "21 name": (f"{parameter('name', 'Shell')}{CMD}</function>", [LS], "no_opener", WHOLE),
    "21 fused": ('{"function=Shell>\n' + f"{CMD}</function>", [LS], "fused_head", WHOLE),
    "22": (f"<parameter=Shell>\n{CMD}</function>\n<parameter=readfile>\n{PATH}</function>", [LS, READ], "name_parameter", WHOLE),
    "X": (
        '{"name": "AddTask", "arguments": {"title": "P1"}\n</parameter>\n</function>\n<tool_call>\n'
        '{"name": "AddTask", "arguments": {"title": "P2"}\n</parameter>\n</function>',
        [("AddTask", {"title": "P1"}), ("AddTask", {"title": "P2"})], "xml_closers", WHOLE,
    ),
    "X key": ('{"name": "Shell", "arguments>\n{"cmd": "ls"}}', [LS], "tag_key", WHOLE),
    "open value": ("<function=Shell>\n<parameter=cmd>\nls\n</function>", [LS], "open_value", WHOLE),
    "open function": (f"<function=Shell>\n{CMD}", [LS], "open_function", WHOLE),
}
"""What a model writes; the calls; the drift; whether it is read in a closed wrapper too or only bare at the end."""

HALF = {
    "2": '{"name": "WriteFile", "arguments": {"path": "a", "body": "b',
    "2 file": '{"name": "WriteFile", "arguments": {"path": "a", "body": "b\n</file>',
    "2 key": '{"name": "Shell", "arguments": {"cmd": "ls", "no',
    "2 comma": '{"name": "Shell", "arguments": {"cmd": "ls",',
    "2 list": '{"name": "Shell", "arguments": {"cmd": "ls", "note": ["a", "b"',
    "2 number": '{"name": "Shell", "arguments": {"cmd": "ls", "note": 1',
    "2 deep": '{"name": "Shell", "arguments": {"cmd": "ls", "note": {"a": {"b": 1}',
    "6": '{"name":\n{"path": "a',
    "8": '{"function": "Shell", "arguments": {"cmd": "l',
    "10": 'Shell", "cmd": "l',
    "11": '{"name": "WriteFile", "arguments": {"path": "m.go", "body": "import "fmt"\nx := []stri',
    "13": '{"name": "Shell", "arguments": {"cmd": "say \\"hi\\" \\',
    "13 unicode": '{"name": "Shell", "arguments": {"cmd": "\\u00e9\\u00',
    "14": "<tool_name>Shell</tool_name>\n<parameter=cmd>l",
    "17": "<function=Shell>\n<parameter=cmd>\nl",
    "17 closer": "<function=Shell>\n<parameter=cmd>\nls\n</param",
    "17 next": f"<function=Shell>\n{CMD}<parameter=no",
    "17b": '{"name": "Shell",\n<parameter=cmd>\nl',
}
"""Calls that the model itself left off in the middle: none may run, whatever ends them."""

CALL = '{"name": "Shell", "arguments": {"cmd": "ls"}}'
XML = f"<function=Shell>\n{CMD}</function>"
WRAPPED = f"<tool_call>\n{CALL}\n</tool_call>"
FLAT_XML = XML.replace("\n", "")

SHOWN = {
    f"{where} {what}": form.format(call)
    for what, call in (("json", CALL), ("xml", FLAT_XML))
    for where, form in {
        "fence": "```\n{}\n```", "open fence": "~~~\n{}", "quoted fence": "> ```\n> {}\n> ```", "code": "use `{}` so",
        "list": "- {}", "list body": "1. do\n   {}", "quote": "> {}", "indent": "    {}", "comment": "<!-- a\n\n{}\n-->",
        "attribute": "<a title='{}'>x</a>", "cdata": "<![CDATA[\n\n{}]]>", "link": "[x]({})", "definition": "[x]: {}",
        "block": "<div>\n\n{}\n</div>", "pre": "<pre>{}</pre>", "inline html": "<b>{}</b>", "array": "[{}]",
    }.items()
}

REFUSED = {
    "unknown": '{"name": "Wipe", "arguments": {"path": "/"}}',
    "unknown alias": '{"function": "wipe", "path": "/"}',
    "unknown bare word": '{"name": wipe, "arguments": {}}',
    "unknown function": f"<function=Wipe>\n{CMD}</function>",
    "unknown tool name": f"<tool_name>Wipe</tool_name>\n{CMD}",
    "unknown, then nameless": f"<function=Wipe>\n</function>\n{CMD}</function>",
    "unknown first parameter": f"<parameter=Wipe>\n{CMD}</function>",
    "no unique tool": '{"name":\n{"zip": "a"}}',
    "other keys": f"{parameter('filePath', 'a')}</function>",
    "person": '{"name":"Alice","age":30}',
    "manifest": '{"name": "app", "version": "1", "scripts": {"name": "Shell"}}',
    "named object": '{"name": {"path": "a"}, "age": 3}',
    "nested": '{"log": {"name": "Shell", "arguments": {"cmd": "ls"}}}',
    "in a string": 'say "{"name": "Shell", "arguments": {}}"',
    "required missing": '{"name": "Shell"}',
    "null": '{"name": null, "arguments": {"cmd": "ls"}}',
    "control": '{"name": "Shell", "arguments": {"cmd": "a\x01b"}}',
    "content outside": '{"name": "Shell", "arguments": {"cmd": 1 <content>x</content>}}',
    "quoted head": '"Shell", "cmd": "ls"}',
    "ambiguous heads": 'Shell", x Shell", "cmd": "ls"}',
    "mentioned parameter": "the schema uses <parameter=path> for the target.",
    "mentioned name": "<name>foo is a placeholder, not a call.",
    "mentioned function": "<function of two variables>",
    "result": "<tool_calls><result><name>Shell</name><output>total 4</output></result></tool_calls>",
    "in a result": f"<result>\n\n{XML}\n</result>",
    "result inside": f"<function=Shell>\n{parameter('cmd', '<output>x</output>')}</function>",
    "prose in it": '{"name": "Shell", "arguments": {"cmd": "ls"}\nand so on',
    "text in function": '<function=Shell>\n{"cmd": 1}\n</function>',
    "value, then parameter": "<function=WriteFile>\n<parameter=path>\na\n<parameter=body>\nb\n</parameter>\n</function>",
    "empty key": "<function=Shell>\n<parameter=>\nls\n</parameter>\n</function>",
    "no required": "<function=Shell>\n<parameter=note>\nx\n</function>",
}
