// Errors that carry a reason: what was expected, what was found, what to do.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace lowbit {

// Thrown by everything that validates numbers which came from a model. The ONNX Runtime wrapper turns it into
// an OrtStatus that names the node; the Python module turns it into lowbit.LowBitError.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Args>
[[noreturn]] void Fail(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  throw Error(out.str());
}

template <typename... Args>
void Require(bool condition, const Args&... args) {
  if (!condition) Fail(args...);
}

}  // namespace lowbit
