"""q27app: Qwen3.6-27B and Qwen3.8-27B on one consumer NVIDIA card.

Files become named arrays (weights). Arrays become a network, written once (model), in operations written twice (kernels):
in NumPy to be read, in CUDA to be fast. An engine with one thread lets many requests share that network. chat turns messages
into tokens and tokens into typed deltas; the daemon speaks HTTP over those deltas. tui, setup and bench are guests.

The map. Imports go downwards only; `tests/test_house.py` holds the rules.

    cli               commands and exit codes; may import anything, inside functions
      cli_run           serve, demo
      cli_launch        launch
      cli_generate      generate, tokens
      cli_weights       convert, inspect, synth
      cli_config        config, list, version
      cli_cache         cache list, cache clear
      cli_kernels       kernels build, list, clear
      cli_tui           the screens, status, chat
      cli_bench         bench: the group, demo-eval, what its commands share
      cli_bench_http    bench speed, concurrency, turns, needle, soak, canonical
      cli_bench_model   bench fidelity, capture, kernels, plot
      cli_doctor        doctor
      cli_models        pull, import, show, rm
      cli_service       service
      cli_setup         plan
      cli_wizard        setup
      cli_residence     load, unload
      cli_uninstall     uninstall
      cli_progress      progress on standard error
      __main__          python -m q27app
    tui               ROOM 7. the terminal
    setup             ROOM 8. this machine: plan, wizard, service, models
    bench             ROOM 9. numbers with their conditions
    daemon            ROOM 6. HTTP
    engine            ROOM 4. many requests, one network: what runs next
    model             ROOM 2. the network, in operations of a backend
    kernels           ROOM 3. those operations
    chat              ROOM 5. text: tokenizer, template, streams, guides
    weights           ROOM 1. files <-> named arrays
    ground floor
      config            what q27app is told, and by whom; the only reader of the environment
      config_values     reading and checking single values
      paths             folders of the user, models by name
      errors            the exception family and the exit codes
      gpu               snapshots of cards and host
      metrics           the daemon's counters
      client            HTTP client of the daemon, and of other servers of OpenAI's dialect
      child_daemon      a daemon of our own as a child process
    data              the bundled demo model

Two threads: the daemon's loop owns sockets, tokenizer and parsers; the engine thread owns the backend, its state and the
sequences. Token ids are the border between text and tensors.
"""

__version__ = "0.1.0"
