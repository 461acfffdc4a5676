# Shared by the installers: messages, a usable Python, pip that can install. Sourced, not run.

say() { printf '%s\n' "$*"; }
fail() { printf 'error: %s\n' "$1" >&2; shift; for line in "$@"; do printf '  %s\n' "$line" >&2; done; exit 1; }

# Sets PYTHON to a Python >= 3.11 with venv and pip, if there is one.
look_for_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      PYTHON=$(command -v "$candidate")
      return 0
    fi
  done
  return 1
}

# Sets PYTHON; as root on Debian, Ubuntu or Fedora installs what is missing, elsewhere names it and leaves.
find_python() {
  look_for_python && return 0
  local install packages first second
  if command -v apt-get >/dev/null 2>&1; then
    install="apt-get install -y"; first="python3 python3-venv"; second="python3.11 python3.11-venv"
  elif command -v dnf >/dev/null 2>&1; then
    install="dnf install -y"; first="python3 python3-pip"; second="python3.11 python3.11-pip"
  else
    fail "no Python 3.11 or newer with the venv module was found." "Install one, and set PYTHON=/path/to/python3."
  fi
  # A system whose own python3 is older needs the second.
  if command -v python3 >/dev/null 2>&1 && python3 -c 'import sys; sys.exit(sys.version_info >= (3, 11))'; then
    first=$second
  fi
  if [ "$(id -u)" != 0 ]; then
    fail "no Python 3.11 or newer with the venv module was found." "Install it: sudo $install $first"
  fi
  if command -v apt-get >/dev/null 2>&1; then apt-get update -q >/dev/null 2>&1 || true; fi
  for packages in "$first" "$second"; do
    say "Installing $packages ..."
    DEBIAN_FRONTEND=noninteractive $install $packages >/dev/null 2>&1 || true
    look_for_python && return 0
  done
  fail "$install $first did not give a Python 3.11 or newer with the venv module." \
    "Install one by hand, and set PYTHON=/path/to/python3."
}

# make_venv FOLDER: a virtual environment, made again where its Python has gone.
make_venv() {
  if ! "$1/bin/python" -c 'import pip' 2>/dev/null; then
    rm -rf "$1"
    "$PYTHON" -m venv "$1" || fail "$1: the virtual environment could not be made with $PYTHON."
  fi
}
