"""ROOM 1. Files <-> named arrays. Knows no network and no GPU. Start at container.py. Imports: ground floor."""
