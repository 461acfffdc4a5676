#!/usr/bin/env bash
# Removes q27app of the user who runs it. Keeps configuration and models unless told otherwise.
#
#   installers/uninstall.sh [--yes] [--purge]
#
# --yes: do not ask. --purge: also remove configuration, models, cache and logs (asks, without --yes).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/common.sh"

is_sure=no
purge=no
for argument in "$@"; do
  case $argument in
    --yes) is_sure=yes ;;
    --purge) purge=yes ;;
    -h|--help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) fail "unknown option $argument." "Options: --yes, --purge." ;;
  esac
done
[ -n "${HOME:-}" ] || fail "HOME is not set." "Set it to the folder of the user whose q27app is to go."

if [ -n "${Q27APP_HOME:-}" ]; then
  config=$Q27APP_HOME/config; data=$Q27APP_HOME/data; cache=$Q27APP_HOME/cache; state=$Q27APP_HOME/state
else
  config=${XDG_CONFIG_HOME:-$HOME/.config}/q27app; data=${XDG_DATA_HOME:-$HOME/.local/share}/q27app
  cache=${XDG_CACHE_HOME:-$HOME/.cache}/q27app; state=${XDG_STATE_HOME:-$HOME/.local/state}/q27app
fi
launcher=$HOME/.local/bin/q27app

agree() {
  [ "$is_sure" = yes ] && return 0
  local answer=no
  printf '%s [y/N] ' "$1"
  read -r answer || true
  case $answer in y|Y|yes) return 0 ;; *) return 1 ;; esac
}
size_of() { du -sh "$1" 2>/dev/null | cut -f1; }
# A symbolic link is removed itself; what it points to stays.
remove() { if [ -L "$1" ]; then rm -f "$1"; else rm -rf "$1"; fi; }

unit=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user/q27app.service
if [ -e "$unit" ]; then
  command -v systemctl >/dev/null 2>&1 && systemctl --user disable --now q27app.service >/dev/null 2>&1 || true
  rm -f "$unit"
  say "Removed the service."
fi
if [ -e "$data/program" ] || [ -e "$launcher" ]; then
  agree "Remove the program ($data/program, $(size_of "$data/program")) and $launcher?" || { say "Nothing removed."; exit 0; }
  remove "$data/program"
  rm -f "$launcher"
  say "Removed the program."
else
  say "No program at $data/program."
fi

for entry in "models:$data" "configuration:$config" "cache:$cache" "logs and history:$state"; do
  what=${entry%%:*}; folder=${entry#*:}
  [ -e "$folder" ] || continue
  if [ "$purge" = yes ] && agree "Remove $what ($folder, $(size_of "$folder"))?"; then
    remove "$folder"
    say "Removed $folder."
  elif [ -n "$(ls -A "$folder" 2>/dev/null)" ]; then
    say "Kept $what: $folder"
  fi
done
