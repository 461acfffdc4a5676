"""ROOM 4. Many requests, one GPU: decides what runs next. Start at engine.py, then scheduler.py. Imports: model,
kernels' interface, weights, ground floor."""
