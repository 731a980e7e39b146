// RegisterCustomOps, for sessions that run lowbit nodes as custom ops, or on the execution provider where the
// host was asked for it (ort/append_provider.h).
#include <string>

#include "core/selection.h"
#include "include/lowbit.h"
#include "ort/append_provider.h"
#include "ort/domain.h"
#include "ort/known_domain.h"
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

// Whether the options hold the execution provider now, which brings the ops along.
[[maybe_unused]] bool HoldsProvider(OrtSessionOptions* options, const OrtApiBase* base) {
  const std::optional<AskedProvider> asked = FindAskedProvider(options);
  if (!asked) return false;
  const std::string refused = AppendProvider(options, base, *asked);
  if (refused.empty()) return true;
  constexpr size_t kMost = 1000;  // ONNX Runtime bounds the values of entries
  const std::string reason = "lowbit: the nodes run as custom ops, not on the execution provider's device '" +
                             asked->device + "': " + refused;
  Check(Api().AddSessionConfigEntry(options, kProviderRefused, reason.substr(0, kMost).c_str()));
  return false;
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
    if constexpr (!lowbit::kMinimal) {
      MakeDomainKnown();
      if (HoldsProvider(options, base)) return nullptr;
    }
    Check(Api().AddCustomOpDomain(options, Domain()));
    Check(Api().AddSessionConfigEntry(options, kRegistered, "1"));
    return nullptr;
  } catch (...) {
    return StatusFromException("lowbit: ");
  }
}
