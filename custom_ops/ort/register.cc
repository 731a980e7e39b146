// RegisterCustomOps, for sessions that run lowbit nodes as custom ops.
#include <string>

#include "include/lowbit.h"
#include "ort/domain.h"
#include "ort/ort_api.h"

namespace lowbit::ort {
namespace {

// The session entry that marks options which hold the library.
constexpr const char* kRegistered = "lowbit.registered";

bool Holds(const OrtSessionOptions* options, const std::string& entry) {
  int found = 0;
  Check(Api().HasSessionConfigEntry(options, entry.c_str(), &found));
  return found != 0;
}

}  // namespace
}  // namespace lowbit::ort

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL
RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) noexcept {
  using namespace lowbit::ort;
  if (OrtStatus* refused = Attach(base)) return refused;
  try {
    // Whoever registers the library in the same options again (an application and a helper of it) means the
    // same, so the second time does nothing.
    if (Holds(options, kRegistered) || Holds(options, std::string(kProviderPrefix) + kBringsOps))
      return nullptr;
    Check(Api().AddCustomOpDomain(options, Domain()));
    Check(Api().AddSessionConfigEntry(options, kRegistered, "1"));
    return nullptr;
  } catch (...) {
    return StatusFromException("lowbit: ");
  }
}
