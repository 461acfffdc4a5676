"""ROOM 8. This machine: cards, plan, service. Start at plan.py. Imports: weights, model's arithmetic, ground floor."""
