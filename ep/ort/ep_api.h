// The parts of ONNX Runtime's function table that only execution providers use, and what all of ep/ort
// shares.
#pragma once

#include <string>

#include "ort/domain.h"
#include "ort/ort_api.h"

namespace lowbit::ep {

using ort::Api;
using ort::Check;
using ort::kProviderName;
using ort::Owned;

inline constexpr const char* kVendorName = "lowbit";

const OrtEpApi& EpApi();

// Runs fn() and turns what it throws into a status. No exception may cross the C boundary.
template <typename Fn>
OrtStatus* Guarded(Fn&& fn) noexcept {
  try {
    fn();
    return nullptr;
  } catch (...) {
    return ort::StatusFromException("lowbit: ");
  }
}

// To the session's log (or the environment's), which the user may have sent elsewhere or silenced.
class Logger {
 public:
  explicit Logger(const OrtLogger* logger) : logger_(logger) {}

  void Info(const std::string& message) const noexcept { Log(ORT_LOGGING_LEVEL_INFO, message); }
  void Warning(const std::string& message) const noexcept { Log(ORT_LOGGING_LEVEL_WARNING, message); }
  bool TakesInfo() const noexcept;

 private:
  void Log(OrtLoggingLevel level, const std::string& message) const noexcept;

  const OrtLogger* logger_;
};

}  // namespace lowbit::ep
