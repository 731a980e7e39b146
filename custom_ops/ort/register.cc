// The library's one exported function.
#include <deque>
#include <string>

#include "core/schema.h"
#include "core/status.h"
#include "ort/custom_op.h"
#include "ort/ort_api.h"

namespace lowbit::ort {
namespace {

// The session entry that marks options which hold the library.
constexpr const char* kRegistered = "lowbit.registered";

OrtCustomOpDomain* BuildDomain() {
  static auto& ops = *new std::deque<CustomOp>;  // the domain points into it and is never released either
  OrtCustomOpDomain* domain = nullptr;
  Check(Api().CreateCustomOpDomain(kDomain, &domain));
  for (const OpSchema& schema : OpSchemas())
    Check(Api().CustomOpDomain_Add(domain, &ops.emplace_back(schema)));
  return domain;
}

// Shared by every session and never released: sessions keep pointers into it and may live until the process
// ends.
OrtCustomOpDomain* Domain() {
  static OrtCustomOpDomain* const domain = BuildDomain();
  return domain;
}

}  // namespace
}  // namespace lowbit::ort

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL
RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) noexcept {
  using namespace lowbit::ort;
  const OrtApi* api = base->GetApi(kApiVersion);
  if (api == nullptr) {
    // The oldest table serves to say so.
    const std::string message = std::string("lowbit needs ONNX Runtime 1.24 or newer, this is ") +
                                base->GetVersionString() + "; update the onnxruntime package";
    return base->GetApi(1)->CreateStatus(ORT_FAIL, message.c_str());
  }
  if (!SetApi(api)) {
    return api->CreateStatus(ORT_FAIL,
                             "lowbit: another ONNX Runtime of this process uses this library already; load a "
                             "copy of the library file under another name");
  }
  try {
    // A session takes a domain once. Whoever registers the library in the same options again (an application
    // and a helper of it) means the same, so the second time does nothing.
    int registered = 0;
    Check(api->HasSessionConfigEntry(options, kRegistered, &registered));
    if (registered != 0) return nullptr;
    Check(api->AddCustomOpDomain(options, Domain()));
    Check(api->AddSessionConfigEntry(options, kRegistered, "1"));
    return nullptr;
  } catch (...) {
    return StatusFromException("lowbit: ");
  }
}
