// The kernels that LOWBIT_CUDA_WITHOUT=name,.. takes out of every choice, so that what each is worth can be
// measured (benchmarks/gpu_rows.py). A name is that of a row, of a kernel of several nodes, or of an option
// of configurations.
#pragma once

#include <set>
#include <span>
#include <string>
#include <string_view>

namespace lowbit::cuda {

using LeftOut = std::set<std::string, std::less<>>;

// The names between commas; spaces around them count for nothing.
LeftOut ParseLeftOut(std::string_view text);
// Throws Error where one is no kernel's or option's and none of `patterns`, or that of the last resort.
void RequireKnownNames(const LeftOut& names, std::span<const char* const> patterns = {});

// What this process leaves out: the variable is read once.
const LeftOut& LeftOutHere();
inline bool IsLeftOut(std::string_view name) { return LeftOutHere().contains(name); }
// ", without halo,team"; empty where nothing is left out. What was measured or packed with some kernels is
// not taken for what it would be with others.
std::string LeftOutText();

}  // namespace lowbit::cuda
