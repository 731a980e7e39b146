// One node of a session: created once, computed many times and from many threads.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/cpu/operator.h"
#include "ort/ort_api.h"
#include "ort/session_codes.h"

namespace lowbit::ort {

class NodeKernel {
 public:
  // Reads attributes and constant inputs and creates the operator. Throws Error, its message naming the node.
  NodeKernel(const OpSchema& schema, const OrtKernelInfo* info);

  void Compute(OrtKernelContext* context) const;
  const std::string& where() const { return where_; }

 private:
  std::string where_;        // "lowbit: node 'name' (Op): ", the beginning of every error
  std::vector<size_t> fed_;  // inputs read at every call; the others are constant or absent
  size_t input_count_;
  size_t threads_ = 0;                           // of the session; 0: not known
  std::shared_ptr<SessionCodes> session_codes_;  // held for the nodes that are created later
  std::unique_ptr<Operator> op_;
};

}  // namespace lowbit::ort
