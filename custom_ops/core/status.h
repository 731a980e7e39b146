// Errors that carry a reason: what was expected, what was found, what to do.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "core/text.h"

namespace lowbit {

// Thrown by everything that validates numbers which came from a model. The ONNX Runtime wrapper turns it into
// an OrtStatus that names the node; the Python module turns it into lowbit.LowBitError.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn, gnu::noinline, gnu::cold]] inline void FailWith(std::initializer_list<TextPiece> pieces) {
  std::string text;
  AppendPieces(text, pieces);
  throw Error(text);
}

template <typename... Args>
[[noreturn]] void Fail(const Args&... args) {
  FailWith({TextPiece(args)...});
}

template <typename... Args>
void Require(bool condition, const Args&... args) {
  if (!condition) Fail(args...);
}

}  // namespace lowbit
