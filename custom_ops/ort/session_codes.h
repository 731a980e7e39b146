// What the nodes of one session know of each other's codes. ONNX Runtime shows a custom op nothing of the
// graph around it, but it creates the nodes of a session one after the other, in the order of the file:
// mostly, but not always, a node behind those that it reads.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "core/stated_codes.h"
#include "ort/ort_api.h"

namespace lowbit::ort {

class SessionCodes {
 public:
  // The one of the session that creates the node of `info`; it lives as long as one of the session's nodes.
  static std::shared_ptr<SessionCodes> Of(const OrtKernelInfo* info);

  // The codes of tensor `name`, where a node that was created before makes them.
  std::optional<MadeCodes> Find(const std::string& name) const;
  // Two graphs of a session, the branches of an If, may give one name to two tensors: what is said of them
  // twice is only known where it is the same. Throws Error where a node that was created before reads `name`
  // in fewer bits.
  void Add(const std::string& name, const std::optional<MadeCodes>& codes);
  // A node reads `name`, of whose codes nothing is known yet.
  void AddReader(const std::string& name, const std::string& node, const MatmulNode& product);
  // True once: for the node that tells what all nodes of the session know.
  bool IsFirst();

 private:
  mutable std::mutex mutex_;
  struct Reader {
    std::string node;
    MatmulNode product;  // op and operand x alone
  };

  std::map<std::string, std::optional<MadeCodes>> codes_;
  std::multimap<std::string, Reader> readers_;
  bool is_first_ = true;
};

}  // namespace lowbit::ort
