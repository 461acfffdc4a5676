"""ROOM 9. Numbers, each with its conditions. Start at report.py."""
