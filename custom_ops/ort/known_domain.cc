#include "ort/known_domain.h"

#include <mutex>
#include <string_view>

#include "ort/domain.h"
#include "ort/environment.h"
#include "ort/ort_api.h"

namespace lowbit::ort {
namespace {

// onnx.helper's model of ir_version 7 and opset 13 with one node, Identity, from x to y, float32 of one element.
constexpr std::string_view kModel(
    "\x08\x07\x3a\x37\x0a\x10\x0a\x01x\x12\x01y\"\x08Identity\x12\x01gZ\x0f\x0a\x01x\x12\x0a\x0a\x08\x08\x01"
    "\x12\x04"
    "\x0a\x02\x08\x01"
    "b\x0f\x0a\x01y\x12\x0a\x0a\x08\x08\x01\x12\x04\x0a\x02\x08\x01"
    "B\x04\x0a\x00\x10\x0d",
    65);

}  // namespace

void MakeDomainKnown() {
  static std::mutex mutex;  // others wait until it is known
  static bool is_known = false;
  const std::lock_guard lock(mutex);
  if (is_known || !Environment::IsThere()) return;
  const Environment env;
  OrtSessionOptions* made = nullptr;
  Check(Api().CreateSessionOptions(&made));
  const Owned<OrtSessionOptions> options(made);
  Check(Api().AddCustomOpDomain(made, Domain()));
  // Nothing runs in it.
  Check(Api().SetIntraOpNumThreads(made, 1));
  Check(Api().SetSessionGraphOptimizationLevel(made, ORT_DISABLE_ALL));
  Check(Api().DisableCpuMemArena(made));
  OrtSession* session = nullptr;
  Check(Api().CreateSessionFromArray(env.get(), kModel.data(), kModel.size(), made, &session));
  const Owned<OrtSession> owned(session);
  is_known = true;
}

}  // namespace lowbit::ort
