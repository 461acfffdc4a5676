#!/usr/bin/env bash
# Installs q27app for the user who runs it, or upgrades it: own virtual environment, launcher, and a first answer.
#
#   installers/install.sh [--no-demo] [--no-gpu]
#
# Nothing outside the user's folders changes, except that root on Debian, Ubuntu or Fedora gets a missing python3.
# Configuration and models are never touched.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source_folder=$(dirname "$here")
. "$here/common.sh"
. "$here/gpu.sh"

run_demo=yes
want_gpu=yes
for argument in "$@"; do
  case $argument in
    --no-demo) run_demo=no ;;
    --no-gpu) want_gpu=no ;;
    -h|--help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) fail "unknown option $argument." "Options: --no-demo, --no-gpu."; ;;
  esac
done
[ -n "${HOME:-}" ] || fail "HOME is not set." "Set it to the folder of the user who will run q27app."

data_folder=${Q27APP_HOME:+$Q27APP_HOME/data}
data_folder=${data_folder:-${XDG_DATA_HOME:-$HOME/.local/share}/q27app}
program=$data_folder/program
launcher=$HOME/.local/bin/q27app

find_python
say "Installing q27app into $program with $("$PYTHON" --version) ..."
mkdir -p "$data_folder" || fail "$data_folder cannot be made." "Set Q27APP_HOME to a folder that you may write."
make_venv "$program"

# Build in a copy, so that the clone stays as it is and may be read-only; install the wheel, so that it may go afterwards.
work=$(mktemp -d) || fail "no temporary folder can be made." "Free some space, or set TMPDIR to a folder that you may write."
trap 'rm -rf "$work"' EXIT
mkdir "$work/source"
(cd "$source_folder" && tar -cf - pyproject.toml README.md LICENSE q27app) | tar -xf - -C "$work/source" ||
  fail "the sources could not be copied into $work." "Free some space, or set TMPDIR to a folder with a few hundred megabytes."
"$program/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$work" "$work/source" ||
  fail "the package could not be built." "The lines above say why; a network connection is needed."
wheel=$(echo "$work"/q27app-*.whl)
if ! "$program/bin/python" -m pip install --quiet --upgrade "$wheel[json]"; then
  say "Without llguidance (it could not be installed): structured output will not be available."
  "$program/bin/python" -m pip install --quiet --upgrade "$wheel" ||
    fail "the package could not be installed." "The lines above say why; a network connection is needed."
fi
"$program/bin/python" -m pip install --quiet --no-deps --force-reinstall "$wheel"

ask() { "$program/bin/python" -P -c "$1"; }
has_device=$(ask 'from q27app.gpu import nvidia_device_exists; print("yes" if nvidia_device_exists() else "no")')
gpu_works=no
if [ "$want_gpu" = no ]; then
  say "GPU part: skipped, as asked."
elif [ "$has_device" = no ]; then
  say "GPU part: skipped, no NVIDIA device. q27app computes on the CPU here."
elif install_gpu; then
  gpu_works=yes
fi

mkdir -p "$(dirname "$launcher")" || fail "$(dirname "$launcher") cannot be made." "Is its parent yours, and a folder?"
cat > "$launcher.new" <<LAUNCHER || fail "$launcher cannot be written." "Is its folder yours, and is there room on its disk?"
#!/bin/sh
exec "$program/bin/q27app" "\$@"
LAUNCHER
chmod 755 "$launcher.new"
mv -f "$launcher.new" "$launcher"

say "Installed: $("$launcher" version | head -n 1), launcher $launcher"
case ":$PATH:" in
  *":$(dirname "$launcher"):"*) ;;
  *) say "Add $(dirname "$launcher") to PATH to call it as q27app." ;;
esac
if [ "$run_demo" = yes ]; then
  backend=auto
  if [ "$has_device" = yes ] && [ "$gpu_works" = no ]; then
    backend=numpy
    say "The demo runs on the CPU, since the GPU part was skipped."
  fi
  "$launcher" demo --backend "$backend"
fi
say "Next: q27app serve"
