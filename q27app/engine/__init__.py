"""ROOM 4. Many requests, one GPU: decides what runs next.

Start at engine.py (the thread and its door), then scheduler.py (who runs), cut.py (what of a pass becomes text), runner.py
(arrays in, tokens out). request.py is what crosses the thread border; sequence.py a request on the inside; block_pool.py
and slot_pool.py what it holds; drafter.py and prefix_cache.py the places where drafts and reuse plug in; loading.py opens a
model; status.py is what may be asked from any thread. Imports: model, kernels' interface, weights, ground floor.
"""
