"""ROOM 3. The arithmetic, written twice. Start at backend.py. Imports: weights, ground floor."""
