#include "ort/environment.h"

#include "core/status.h"

namespace lowbit::ort {

bool Environment::IsThere() {
  if (Api().GetEpApi() == nullptr)
    return false;  // built without plugin execution providers: there is no telling
  OrtKeyValuePairs* entries = nullptr;
  const Owned<OrtStatus> none(Api().GetEpApi()->GetEnvConfigEntries(&entries));
  const Owned<OrtKeyValuePairs> owned(entries);
  return none == nullptr;
}

Environment::Environment() {
  Require(IsThere(), "there is no OrtEnv yet; create it before the custom ops are registered");
  Check(Api().CreateEnv(ORT_LOGGING_LEVEL_WARNING, "lowbit", &env_));
}

}  // namespace lowbit::ort
