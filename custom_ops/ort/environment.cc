#include "ort/environment.h"

#include "core/status.h"

namespace lowbit::ort {

Environment::Environment() {
  OrtKeyValuePairs* entries = nullptr;
  const Owned<OrtStatus> none(Api().GetEpApi()->GetEnvConfigEntries(&entries));
  const Owned<OrtKeyValuePairs> owned(entries);
  Require(none == nullptr, "there is no OrtEnv yet; create it before the custom ops are registered");
  Check(Api().CreateEnv(ORT_LOGGING_LEVEL_WARNING, "lowbit", &env_));
}

}  // namespace lowbit::ort
