"""ROOM 7. The terminal. A client like any other. Start at app.py. Imports: ground floor, setup."""
