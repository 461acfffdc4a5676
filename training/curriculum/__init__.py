"""The text that the demo model learns from: generated, seeded, with held-out splits.

Reading order: example.py (what a piece of text is), pools.py (words), then one file a task; mix.py joins tasks to
conversations, render.py turns them into tokens with q27app's own chat templates.

Every task makes an example from a random generator and a split:

    split    wording, names, tools     values (numbers, pairs, records)
    train    the task's own            none that are held out
    held     the task's own            held out
    new      other ones, which occur   held out
             in no training example
"""
