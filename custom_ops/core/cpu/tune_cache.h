// Measured kernel choices of CPUs, kept between processes. `lowbit tune` writes the file (core/tune_file.h),
// every session reads it when it creates its nodes. The kernel that an entry names is taken where the kernel
// table has it and its row accepts the node (core/cpu/select.cc).
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "core/conv.h"
#include "core/cpu/isa.h"
#include "core/tune_file.h"

namespace lowbit {

// What the node computes and the instruction-set cap; the shape as far as the model states it (`?` where it
// does not).
std::string TuneKey(const ConvSpec& spec, std::string_view shape, Isa isa);

// The file belongs to this machine and build; both throw Error.
std::string FormatTuneCache(const TuneEntries& entries);
TuneEntries ParseTuneCache(std::string_view text);
std::string TuneCachePath();

// The row that was measured for `key`, empty where none was. `threads` is 0 where it is not known; then the
// entry with the most threads counts. The file is read once, and again when it has changed; where it is not
// usable, `warn` hears why, once for each state of the file as long as the library is loaded. Safe to call
// from several threads.
std::string TunedKernel(const std::string& key, int threads,
                        const std::function<void(const std::string&)>& warn);

}  // namespace lowbit
