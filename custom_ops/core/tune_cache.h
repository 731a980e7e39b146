// Measured kernel choices, kept between processes. `lowbit tune` writes the file, every session reads it when
// it creates its nodes.
//
// A file belongs to one kind of machine and one build of lowbit: its name is a hash of both, its header
// spells them out. It is text:
//
//   lowbit tune cache 1
//   machine AMD EPYC 9B45, family 26 model 2 stepping 1
//   build lowbit 0.1.0, kernels 1f0a93b4c2d7e586
//   entries 2, checksum 9b1c04d3aa27f310
//   1 <TAB> conv i64 o64 ... isa=avx512popcnt <TAB> igemm_u8s8_6x64_avx512vnni
//   ...
//
// Nothing in it is trusted. A file that is not exactly of this form counts for nothing, and an entry is only
// a wish: the kernel that it names is taken where the kernel table has it and its row accepts the node
// (core/select.cc). So the worst that a file can do is to make a node slower.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/conv.h"
#include "core/isa.h"

namespace lowbit {

// (what the node computes: TuneKey, threads) -> name of the fastest row
using TuneEntries = std::map<std::pair<std::string, int>, std::string>;

// Everything that decides which kernel is fastest, but the machine, the build and the threads: geometry,
// operands, epilogue, the instruction-set cap, and the shape as far as the model states it (`?` where it does
// not).
std::string TuneKey(const ConvSpec& spec, std::string_view shape, Isa isa);

// Throws Error with the entry that the format cannot hold.
std::string FormatTuneCache(const TuneEntries& entries);
// Throws Error with what is wrong with the text.
TuneEntries ParseTuneCache(std::string_view text);

// The file of this machine and build, in LOWBIT_CACHE_DIR or the user's cache folder; empty where the
// environment names neither.
std::string TuneCachePath();

// LOWBIT_TUNE=off (or 0): sessions do without the file.
bool TuneCacheEnabled();

// The row that was measured for `key`, empty where none was. `threads` is 0 where it is not known; then the
// entry with the most threads counts. The file is read once, and again when it has changed; where it is not
// usable, `warn` hears why, once for each state of the file as long as the library is loaded. Safe to call
// from several threads.
std::string TunedKernel(const std::string& key, int threads,
                        const std::function<void(const std::string&)>& warn);

}  // namespace lowbit
