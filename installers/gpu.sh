# The GPU part of the installation: a CUDA compiler that goes with the driver, PyCUDA built with it, compiled kernels. Sourced by
# install.sh after common.sh, which has set: program (the virtual environment), wheel (the package), work (a scratch folder), ask.

# cuda_of_driver: prints the newest CUDA that the driver runs, such as 13.0; nothing if no driver answers.
cuda_of_driver() {
  local found
  found=$(ask 'from q27app.gpu import read_driver; d = read_driver(); print("%d.%d" % d.cuda if d and d.cuda else "")' 2>/dev/null || true)
  [ -n "$found" ] || found=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9][0-9]*\.[0-9][0-9]*\).*/\1/p' | head -n 1)
  printf '%s' "$found"
}

# nvcc_release NVCC: prints its version, such as 13.0.
nvcc_release() { "$1" --version 2>/dev/null | sed -n 's/.*release \([0-9][0-9]*\.[0-9][0-9]*\).*/\1/p'; }

# toolkit_of NVCC: prints the folder of its toolkit; nvcc itself knows it, also where what is on PATH is only a wrapper.
toolkit_of() {
  local top
  top=$("$1" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' | head -n 1)
  [ -n "$top" ] || top=$(dirname "$(dirname "$(readlink -f "$1")")")
  (cd "$top" 2>/dev/null && pwd -P)
}

has_headers() { [ -f "$1/include/cuda.h" ] || [ -f "$1/targets/x86_64-linux/include/cuda.h" ]; }

# find_toolkit CUDA: sets toolkit to one that compiles for this driver; says why others do not.
find_toolkit() {
  local nvcc release folder
  toolkit=
  for nvcc in "$(command -v nvcc || true)" ${cuda_folders:-/usr/local/cuda /usr/local/cuda-* /opt/cuda}; do
    [ -d "$nvcc" ] && nvcc=$nvcc/bin/nvcc
    [ -x "$nvcc" ] || continue
    release=$(nvcc_release "$nvcc")
    [ -n "$release" ] || { say "GPU part: $nvcc does not run; passed over."; continue; }
    if [ "${release%%.*}" -gt "${1%%.*}" ]; then
      say "GPU part: $nvcc is CUDA $release, the driver runs $1 at most; passed over."
      continue
    fi
    folder=$(toolkit_of "$nvcc")
    has_headers "$folder" || { say "GPU part: $nvcc has no cuda.h in $folder; passed over."; continue; }
    toolkit=$folder
    return 0
  done
  return 1
}

# fetch_toolkit CUDA: installs compiler and headers as Python packages into the program's environment; sets toolkit.
fetch_toolkit() {
  local major=${1%%.*} minor=${1#*.} package wanted=()
  if [ "$major" -lt 13 ]; then
    say "GPU part: the driver runs CUDA $1. A compiler for it cannot be fetched: install the CUDA $1 toolkit, or a driver for CUDA 13."
    return 1
  fi
  say "GPU part: fetching a CUDA $major compiler (no newer than $1) ..."
  for package in nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl; do
    wanted+=("$package>=$major,<$major.$((minor + 1))")
  done
  if ! "$program/bin/python" -m pip install --quiet --upgrade "${wanted[@]}"; then
    say "GPU part: the compiler could not be fetched; the lines above say why. Install the CUDA toolkit, or look at the network."
    return 1
  fi
  toolkit=$("$program/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/nvidia/cu$major
  chmod -R u+x "$toolkit/bin" "$toolkit/nvvm/bin" 2>/dev/null || true
  # Where the program looks first: kernels are compiled at run time too, and a service has no PATH of the user.
  printf '#!/bin/sh\nexec "%s" "$@"\n' "$toolkit/bin/nvcc" > "$program/bin/nvcc"
  chmod 755 "$program/bin/nvcc"
}

# build_pycuda: PyCUDA comes as source. Its setup reads a file of the home folder: it gets a home of its own, so that the user's
# stays as it is. No curand, which many toolkits lack; a stub stands in for the driver's library, which only the driver has;
# no package cache, which would give back a wheel of other settings.
build_pycuda() {
  local home=$work/pycuda
  mkdir -p "$home/stubs"
  if ! command -v g++ >/dev/null 2>&1; then
    say "GPU part: there is no C++ compiler, which PyCUDA and nvcc need. Install it: sudo apt-get install g++ (or: sudo dnf install gcc-c++)."
    return 1
  fi
  gcc -shared -Wl,-soname,libcuda.so.1 -o "$home/stubs/libcuda.so" -x c /dev/null || return 1
  cat > "$home/.aksetup-defaults.py" <<SETTINGS
CUDA_ROOT = "$toolkit"
CUDA_ENABLE_CURAND = False
LDFLAGS = ["-Wl,--no-as-needed", "-L$home/stubs", "-lcuda"]
SETTINGS
  say "GPU part: building PyCUDA with $toolkit (some minutes) ..."
  if ! HOME=$home PATH="$toolkit/bin:$PATH" "$program/bin/python" -m pip install --quiet --no-cache-dir --no-binary pycuda "$1" \
      > "$home/log" 2>&1; then
    tail -n 15 "$home/log" >&2
    explain_build "$home/log"
    return 1
  fi
}

# explain_build LOG: in one line what the usual failures mean.
explain_build() {
  if grep -q 'cuda.h: No such file' "$1"; then
    say "GPU part: the toolkit has no headers. Install its development files."
  elif grep -q 'Python.h: No such file' "$1"; then
    say "GPU part: Python's headers are missing. Install them: sudo apt-get install python3-dev (or: sudo dnf install python3-devel)."
  elif grep -qE 'cannot find -l(cudart|cuda|curand)' "$1"; then
    say "GPU part: the linker misses a library of the toolkit; install the whole toolkit."
  elif grep -qiE 'No matching distribution|Temporary failure|Connection' "$1"; then
    say "GPU part: PyCUDA's source could not be fetched; look at the network."
  else
    say "GPU part: PyCUDA could not be built with $toolkit; the lines above say why."
  fi
}

# install_gpu: the whole part. 0 if the GPU can be used. Says what is missing otherwise; the rest of the program works all the same.
install_gpu() {
  local cuda extra
  cuda=$(cuda_of_driver)
  if [ -z "$cuda" ]; then
    say "GPU part: skipped, there is an NVIDIA device, but its driver does not answer. Check nvidia-smi, then run this again."
    return 1
  fi
  say "GPU part: the driver runs CUDA $cuda."
  find_toolkit "$cuda" || fetch_toolkit "$cuda" || return 1
  extra=cuda13
  [ "$(nvcc_release "$toolkit/bin/nvcc" | cut -d. -f1)" -ge 13 ] || extra=cuda12
  build_pycuda "pycuda>=2025.1" || { say "Run this again afterwards."; return 1; }
  "$program/bin/python" -m pip install --quiet "$wheel[$extra]" || { say "GPU part: cuda-bindings could not be installed."; return 1; }
  if ! ask 'import pycuda.driver' 2> "$work/import"; then
    say "GPU part: PyCUDA is built and cannot be used: $(tail -n 1 "$work/import")"
    grep -q 'libcuda.so.1' "$work/import" && say "libcuda.so.1 belongs to the driver; it is not on this machine's library path."
    return 1
  fi
  say "GPU part: compiling kernels for this card ..."
  "$program/bin/q27app" kernels build || { say "GPU part: the kernels do not compile; q27app doctor says more."; return 1; }
}
