#!/bin/bash -eu
# Builds the targets with the compiler, the sanitizer (CFLAGS, CXXFLAGS) and the engine that OSS-Fuzz gives.
cmake -S . -B build/fuzz -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DLOWBIT_FUZZERS=ON -DLOWBIT_PYTHON=OFF \
  -DORT_INCLUDE_DIR=/opt/onnxruntime/include
cmake --build build/fuzz --target lowbit_fuzz_node lowbit_fuzz_compiled lowbit_fuzz_tune_file lowbit_fuzz_seeds

build/fuzz/tests/fuzz/lowbit_fuzz_seeds build/fuzz/seeds
for target in node compiled tune_file; do
  cp "build/fuzz/tests/fuzz/lowbit_fuzz_$target" "$OUT/"
  zip -jqr "$OUT/lowbit_fuzz_${target}_seed_corpus.zip" "build/fuzz/seeds/$target"
done
