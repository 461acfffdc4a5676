"""The command line: which commands there are, and what leaves the program when something goes wrong.

Commands live in `cli_*.py` and are imported when they run, so that `--help` stays quick. Results go to standard output,
everything else to standard error. `main` alone decides exit codes (see `errors`).
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from typing import Any

import click

from q27app import __version__, errors

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("q27app.cli_run:serve", "Serve a model over HTTP until stopped."),
    "demo": ("q27app.cli_run:demo", "Ask the bundled model three questions, to see that everything works."),
    "status": ("q27app.cli_tui:status", "Show what the daemon does."),
    "chat": ("q27app.cli_tui:chat", "Ask the daemon's model something."),
    "launch": ("q27app.cli_launch:launch", "Start a coding client on the daemon's model."),
    "generate": ("q27app.cli_generate:generate", "Continue a prompt once, without a daemon."),
    "tokens": ("q27app.cli_generate:tokens", "Turn text into token ids and back."),
    "convert": ("q27app.cli_weights:convert", "Convert a Hugging Face folder or a GGUF file to .q27."),
    "inspect": ("q27app.cli_weights:inspect", "Show what a .q27 file holds."),
    "synth": ("q27app.cli_weights:synth", "Write a constructed checkpoint for tests and measurements."),
    "list": ("q27app.cli_config:list_command", "List the models that can be named."),
    "pull": ("q27app.cli_models:pull", "Download a model from the Hugging Face hub."),
    "import": ("q27app.cli_models:import_model", "Take a .q27, GGUF or safetensors folder into the models folder."),
    "show": ("q27app.cli_models:show", "Show a model: tier, size, and whether it fits this card."),
    "rm": ("q27app.cli_models:rm", "Delete a model of the models folder."),
    "load": ("q27app.cli_residence:load", "Have the daemon load its model."),
    "unload": ("q27app.cli_residence:unload", "Have the daemon give its model's memory back."),
    "setup": ("q27app.cli_wizard:setup", "Set up card, model, window, service and key, with reasons."),
    "service": ("q27app.cli_service:service", "Run the daemon as a systemd user service."),
    "uninstall": ("q27app.cli_uninstall:uninstall", "Take q27app off this machine."),
    "bench": ("q27app.cli_bench:bench", "Measure the model's answers."),
    "cache": ("q27app.cli_cache:cache", "Show or empty the folder where computed prompts are kept."),
    "kernels": ("q27app.cli_kernels:kernels", "Compile, show or remove the GPU's programs."),
    "config": ("q27app.cli_config:config", "Show the configuration and where each value comes from."),
    "version": ("q27app.cli_config:version", "Print versions."),
    "plan": ("q27app.cli_setup:plan", "Say what a card should run, and why."),
    "doctor": ("q27app.cli_doctor:doctor", "Say what is wrong with this machine, and how to fix it."),
}
"""Command -> (module:attribute, the line that help shows)."""

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command is used or asked for help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        import importlib

        module, attribute = COMMANDS[name][0].split(":")
        return getattr(importlib.import_module(module), attribute)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            advice = f" Did you mean {near[0]!r}?" if near else f" Commands: {', '.join(COMMANDS)}."
            raise click.UsageError(f"There is no command {args[0]!r}.{advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings=CONTEXT, no_args_is_help=False)
@click.version_option(__version__, prog_name="q27app", message="%(prog)s %(version)s")
@click.option("--connect", metavar="URL", help="Without a command: show the daemon there.")
@click.option("--key", metavar="KEY", help="API key for it, or @FILE.")
@click.option("--ascii", "is_ascii", is_flag=True, help="Draw the screens with ASCII alone.")
@click.option("--no-mouse", is_flag=True, help="Leave the mouse to the terminal.")
@click.pass_context
def root(ctx: click.Context, connect: str | None, key: str | None, is_ascii: bool, no_mouse: bool) -> None:
    """q27app serves Qwen3.6-27B and Qwen3.8-27B on one consumer NVIDIA card.

    Without a command it opens the screens: monitor, chat, models, log. They show the daemon that runs, or start one.

    \b
    First steps:
      q27app demo                     ask the bundled model something
      q27app serve                    serve it on http://127.0.0.1:8027
      q27app convert FOLDER my.q27    make a model of your own
    """
    if ctx.invoked_subcommand is None:
        _bare(ctx, connect, key, is_ascii, not no_mouse)


def _bare(ctx: click.Context, connect: str | None, key: str | None, is_ascii: bool, use_mouse: bool) -> None:
    """No command: on a terminal the screens; on a dumb one the state of things and the help; elsewhere exit code 2."""
    from q27app.config import variable

    if sys.stdout.isatty() and sys.stdin.isatty() and variable("TERM") not in ("", "dumb"):
        from q27app.cli_tui import open_tui

        ctx.exit(open_tui(connect, key, is_ascii, use_mouse))
    if not sys.stdout.isatty():
        raise errors.UsageError("the screens need a terminal, and this is none. Usage: q27app COMMAND ...",
                                f"See q27app --help. Commands: {', '.join(COMMANDS)}.")
    from q27app.config import load_config

    server = load_config().server
    where = f"{server.host}:{server.port}"
    if _answers(server.host, server.port):
        click.echo(f"Something answers at {where}.")
    else:
        click.echo(f"No daemon at {where}. Start one with: q27app serve")
    click.echo()
    click.echo(ctx.get_help())


def _answers(host: str, port: int) -> bool:
    import socket

    try:
        with socket.create_connection((host, port), timeout=0.3):
            return True
    except OSError:
        return False


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run a command and leave with its exit code."""
    code = run(sys.argv[1:] if arguments is None else arguments)
    try:
        if sys.stdout is not None:   # started without one
            sys.stdout.flush()
    except BrokenPipeError:
        _silence(sys.stdout)
    except OSError as error:
        code = _not_written(error)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """The command's exit code. Errors of the family end in a message and a hint, others in a line and a log entry."""
    try:
        result = root.main(args=arguments, prog_name="q27app", standalone_mode=False)
        return result if isinstance(result, int) else errors.EXIT_OK
    except errors.Q27Error as error:
        return _complain(error.message, error.hint, error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:   # its message is the help
        click.echo(error.format_message(), err=True)
        command = error.ctx.command_path if error.ctx else "q27app"
        return _complain(f"{command} wants one of its commands.", "", errors.EXIT_USAGE)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "q27app"
        return _complain(error.format_message(), f"See {command} --help.", errors.EXIT_USAGE)
    except click.ClickException as error:
        return _complain(error.format_message(), "", errors.EXIT_FAILED)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return errors.EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence(sys.stdout)
        return errors.EXIT_FAILED
    except OSError as error:
        return _not_written(error) if error.errno in NO_ROOM else report_crash(error, arguments)
    except Exception as error:  # a mistake of ours: the traceback belongs in a file, not on the user's screen
        return report_crash(error, arguments)


def report_crash(error: Exception, arguments: Sequence[str] = ()) -> int:
    """Write an error of ours into errors.log and say so; the exit code."""
    where = _write_traceback(error, arguments)
    return _complain(f"internal error: {type(error).__name__}: {error}", f"Details: {where}", errors.EXIT_INTERNAL)


def _complain(message: str, hint: str, code: int) -> int:
    label = click.style("error:", fg="red", bold=True) if _use_color() else "error:"
    click.echo(f"{label} {message}", err=True)
    if hint:
        click.echo(f"  {hint}", err=True)
    return code


def _not_written(error: OSError) -> int:
    """A disk is full, or the output takes no more; what is still buffered goes."""
    _silence(sys.stdout)
    where = f"{error.filename} cannot be written" if error.filename else "the output cannot be written"
    hint = "Free some space, or have it written elsewhere." if error.errno in NO_ROOM else "Have it written elsewhere."
    return _complain(f"{where}: {errors.why(error)}.", hint, errors.EXIT_FAILED)


def _use_color() -> bool:
    from q27app.config import no_color

    return sys.stderr.isatty() and not no_color()


def _silence(stream: Any) -> None:
    """The reader has gone: nothing that is still buffered may complain at exit."""
    import os

    if stream is None:
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _write_traceback(error: Exception, arguments: Sequence[str]) -> str:
    """Append the error's traceback to errors.log in the state folder; the path, or why it could not be written."""
    import time
    import traceback

    from q27app.paths import ensured, state_dir

    report = "".join(traceback.format_exception(error))
    try:
        path = ensured(state_dir()) / "errors.log"
        with path.open("a", encoding="utf-8") as log:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"{stamp} q27app {__version__} {list(arguments[:1])}\n{report}\n")
        return str(path)
    except (OSError, errors.Q27Error) as failure:
        return f"not written ({failure})\n{report}"
