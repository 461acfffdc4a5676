#!/bin/sh
# Every check on this machine's card. Usage: tests/gpu/run.sh [stages] [models] [speed]
cd "$(dirname "$0")/../.." || exit 1
exec "${PYTHON:-python3}" -m tests.gpu.checks "$@"
