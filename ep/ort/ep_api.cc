#include "ep/ort/ep_api.h"

namespace lowbit::ep {

const OrtEpApi& EpApi() {
  static const OrtEpApi* const api = Api().GetEpApi();
  return *api;
}

bool Logger::TakesInfo() const noexcept {
  OrtLoggingLevel level = ORT_LOGGING_LEVEL_WARNING;
  const Owned<OrtStatus> failed(Api().Logger_GetLoggingSeverityLevel(logger_, &level));
  return failed == nullptr && level <= ORT_LOGGING_LEVEL_INFO;
}

void Logger::Log(OrtLoggingLevel level, const std::string& message) const noexcept {
  // A message that cannot be written must not fail what it tells about.
  const Owned<OrtStatus> unwritten(Api().Logger_LogMessage(logger_, level, message.c_str(), ORT_FILE,
                                                           __LINE__, static_cast<const char*>(__FUNCTION__)));
}

}  // namespace lowbit::ep
