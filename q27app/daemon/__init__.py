"""ROOM 6. HTTP. Start at app.py. Imports: engine, chat, ground floor."""
