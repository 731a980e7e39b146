// What the C++ tests say when they fail.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>

#include "core/status.h"

namespace lowbit {

inline int g_failures = 0;

inline void Expect(bool condition, std::string_view what) {
  if (condition) return;
  ++g_failures;
  std::fprintf(stderr, "failed: %.*s\n", static_cast<int>(what.size()), what.data());
}

// The message of the Error that `call` throws; empty where it throws none.
template <typename Call>
std::string ErrorOf(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

template <typename Call>
bool Throws(Call&& call) {
  return !ErrorOf(call).empty();
}

// The exit status of a test program.
inline int ReportFailures() {
  if (g_failures == 0) std::puts("ok");
  return g_failures == 0 ? 0 : 1;
}

}  // namespace lowbit
