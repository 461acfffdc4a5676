"""ROOM 9. Numbers, each with its conditions. Start at report.py (what every report holds) and journal.py (what survives).

    journal, stamp, report, plots      what every measurement shares
    exchange, prompts, endpoint        asking a server, by the client's clock
    speed, concurrency, turns, needle, soak, canonical      over HTTP, of any server of OpenAI's dialect
    kernels, feeder                    the network driven directly
    fidelity, divergence, statistics, captures, corpus      one network against another, token by token
    demo_eval, demo_probe              the bundled model's answers
"""
