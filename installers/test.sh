#!/usr/bin/env bash
# Runs the tests in a virtual environment of their own, with nothing but python3 on the machine. Arguments go to pytest.
#
#   installers/test.sh [PYTEST ARGUMENT ...]
#
# The environment is build/test-venv in the clone; Q27APP_TEST_VENV names another folder.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(dirname "$here")
. "$here/common.sh"

find_python
environment=${Q27APP_TEST_VENV:-$repository/build/test-venv}
make_venv "$environment"
python=$environment/bin/python
wanted=$(cat "$repository/pyproject.toml" | cksum)
if [ "$(cat "$environment/installed" 2>/dev/null)" != "$wanted" ]; then
  say "Installing the package and its test tools into $environment ..."
  "$python" -m pip install --quiet --editable "$repository[dev]" || fail "the test environment could not be installed."
  printf '%s' "$wanted" > "$environment/installed"
fi
cd "$repository"
unset Q27APP_TEST_VENV
exec "$python" -m pytest -q -p no:cacheprovider -n 2 --dist loadfile "$@"
