#include "ort/session_codes.h"

#include <utility>

#include "core/status.h"

namespace lowbit::ort {

std::shared_ptr<SessionCodes> SessionCodes::Of(const OrtKernelInfo* info) {
  // Every session has a logger of its own, which lives longer than its nodes. It is the only thing that all
  // nodes of a session are shown, and those of no other.
  const OrtLogger* session = nullptr;
  Check(Api().KernelInfo_GetLogger(info, &session));
  static std::mutex mutex;
  // Never destroyed: sessions may outlive static destructors.
  static auto& sessions = *new std::map<const OrtLogger*, std::weak_ptr<SessionCodes>>;
  const std::lock_guard lock(mutex);
  std::erase_if(sessions, [](const auto& each) { return each.second.expired(); });
  std::weak_ptr<SessionCodes>& known = sessions[session];
  std::shared_ptr<SessionCodes> codes = known.lock();
  if (codes == nullptr) known = codes = std::make_shared<SessionCodes>();
  return codes;
}

std::optional<MadeCodes> SessionCodes::Find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = codes_.find(name);
  return found == codes_.end() ? std::nullopt : found->second;
}

void SessionCodes::Add(const std::string& name, const std::optional<MadeCodes>& codes) {
  const std::lock_guard lock(mutex_);
  const auto [place, is_new] = codes_.try_emplace(name, codes);
  if (!is_new && place->second != codes) place->second.reset();
  const auto [begin, end] = readers_.equal_range(name);
  for (auto reader = begin; reader != end; ++reader) {
    try {
      static_cast<void>(HoldsStatedBits(reader->second.product, place->second));
    } catch (const Error& e) {
      Fail("node '", reader->second.node, "' (", reader->second.product.op, "): ", e.what());
    }
  }
}

void SessionCodes::AddReader(const std::string& name, const std::string& node, const MatmulNode& product) {
  Reader reader{node, {}};
  reader.product.op = product.op;
  reader.product.conv.x = product.conv.x;
  const std::lock_guard lock(mutex_);
  readers_.emplace(name, std::move(reader));
}

bool SessionCodes::IsFirst() {
  const std::lock_guard lock(mutex_);
  return std::exchange(is_first_, false);
}

}  // namespace lowbit::ort
