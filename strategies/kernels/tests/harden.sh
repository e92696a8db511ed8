#!/bin/sh
# Call the compiled kernels at random, and run their tests, under sanitizers:
#
#     harden.sh PYTHON CALLS
#
# Needs CMake 3.21 and g++; where there is clang++ as well, libFuzzer chooses calls.
set -eu
cd "$(dirname "$0")/.."
python=$1 calls=$2

build() {
  cmake --preset "$1" >/dev/null
  cmake --build --preset "$1" >/dev/null
}

for preset in address thread; do
  build $preset
  echo "== $preset: random calls"
  build/$preset/fdk_fuzz "$calls"
  # The interpreter is not linked with the runtimes of the sanitizers, so they are loaded before it.
  runtimes="libtsan.so libstdc++.so"
  test $preset = thread || runtimes="libasan.so libubsan.so libstdc++.so"
  preload=$(for name in $runtimes; do "${CXX:-c++}" -print-file-name="$name"; done)
  echo "== $preset: tests"
  # At random addresses the sanitizer of threads may find no room for its own memory.
  LD_PRELOAD=$(echo $preload) ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=halt_on_error=1 \
    FLWR_DECENTRAL_TEST_LIBRARY="$PWD/build/$preset/libflwr_decentral_kernels.so" \
    setarch -R "$python" -m pytest -q -m "not flower and not bench and not cuda" \
    tests/test_native.py tests/test_digests.py
done

if ! command -v clang++ >/dev/null; then
  echo "== no libFuzzer, for there is no clang++"
  exit
fi
build fuzzer
echo "== libFuzzer"
log=build/fuzzer/log
build/fuzzer/fdk_fuzz -runs="$calls" -max_len=64 -len_control=0 2>$log || { cat $log; exit 1; }
tail -n 1 $log
