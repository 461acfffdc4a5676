"""ROOM 7. The terminal. A client like any other: all it knows comes over HTTP. Imports: ground floor, setup.

Start at app.py. `snapshot` reads what the daemon says, `poller` keeps asking, `panels` turns it into lines of text, `screens`
and `widgets` show them; `history` keeps conversations, `blocks` and `widgets/transcript` draw them as they stream; `plain` is
the same without a screen.
"""
