"""ROOM 6. HTTP: three dialects over one stream of deltas. Start at app.py, then generate.py. Imports: engine, chat,
ground floor.

Every dialect file has the same three functions: `parse(body) -> ChatRequest`, `render(identity, answer) -> dict` and
`events(identity, deltas) -> async iterator of bytes`. Know one, know all.
"""
