"""ROOM 5. Messages -> prompt tokens; tokens -> typed deltas. No I/O. Start at types.py. Imports: ground floor."""
