"""ROOM 4. Many requests, one GPU: decides what runs next.

Start at engine.py (the thread and its door), then scheduler.py (who runs), cut.py (what of a pass becomes text), runner.py
(arrays in, tokens out). request.py is what crosses the thread border; sequence.py a request on the inside; block_pool.py
and slot_pool.py what it holds; drafter.py and prefix_cache.py the places where drafts and reuse plug in. Reuse is
snapshot_cache.py over snapshots.py, with settle.py for turns that have ended and disk_cache.py (disk_entry.py, disk_reading.py) for
what survives the process, which arrival.py brings back; cache_plan.py says what it gets of the machine. loading.py opens a model; status.py is what may be
asked from any thread. Imports: model, kernels' interface, weights, ground floor.
"""
