"""Where q27app keeps things: four folders of the user, the models folder, the bundled model.

The only user of platformdirs. Functions name folders and create none; `ensured` does. `$Q27APP_HOME` puts all four below
one folder.
"""

from __future__ import annotations

from pathlib import Path

from q27app.config import home_override
from q27app.errors import UsageError

DEMO = "demo"
_MODEL_SUFFIX = ".q27"


def _folder(kind: str) -> Path:
    home = home_override()
    if home is not None:
        return home / kind
    import platformdirs

    return Path(getattr(platformdirs, f"user_{kind}_dir")("q27app", appauthor=False))


def config_dir() -> Path:
    """config.toml and key files: ~/.config/q27app."""
    return _folder("config")


def data_dir() -> Path:
    """Models, and the program itself where the installer put it: ~/.local/share/q27app."""
    return _folder("data")


def cache_dir() -> Path:
    """What can be made again, such as compiled kernels: ~/.cache/q27app."""
    return _folder("cache")


def state_dir() -> Path:
    """Logs and history: ~/.local/state/q27app."""
    return _folder("state")


def models_dir() -> Path:
    """Where a model is looked up by its name."""
    return data_dir() / "models"


def ensured(folder: Path, mode: int = 0o700) -> Path:
    """`folder`, created with its parents if it was not there. Raises UsageError if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be created: {error.strerror}.",
                         "Set Q27APP_HOME to a folder that you may write.") from error
    return folder


def demo_model() -> Path:
    """The model bundled with the package."""
    return Path(__file__).resolve().parent / "data" / "demo.q27"


def installed_models() -> list[Path]:
    """The .q27 files of the models folder, by name."""
    try:
        return sorted(path for path in models_dir().iterdir() if path.suffix == _MODEL_SUFFIX and path.is_file())
    except OSError:
        return []


def resolve_model(name: str) -> Path:
    """The file that `name` means: "demo", a path, or a model of the models folder with or without .q27.

    Raises UsageError naming what is there.
    """
    if name == DEMO:
        return demo_model()
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if name and path.name == name:
        for candidate in (models_dir() / name, models_dir() / (name + _MODEL_SUFFIX)):
            if candidate.is_file():
                return candidate
    names = ", ".join(model.stem for model in installed_models()) or "none yet"
    found = "is a folder" if path.is_dir() else "is neither a file nor a model's name"
    hint = ("Convert it first: q27app convert FOLDER MODEL.q27." if path.is_dir()
            else f'Give a path, "demo", or one of {models_dir()}: {names}.')
    raise UsageError(f"model {name!r} {found}.", hint)
