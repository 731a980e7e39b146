#include "kernels/cuda/left_out.h"

#include <algorithm>
#include <cstdlib>

#include "core/status.h"
#include "kernels/cuda/conv/select.h"
#include "kernels/cuda/fused/fused_row.h"

namespace lowbit::cuda {
namespace {

constexpr std::string_view kVariable = "LOWBIT_CUDA_WITHOUT";

std::string Joined(const LeftOut& names, const char* between) {
  std::string text;
  for (const std::string& name : names) text.append(text.empty() ? "" : between).append(name);
  return text;
}

}  // namespace

LeftOut ParseLeftOut(std::string_view text) {
  LeftOut names;
  while (!text.empty()) {
    std::string_view name = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), name.size() + 1));
    name.remove_prefix(std::min(name.find_first_not_of(' '), name.size()));
    name = name.substr(0, name.find_last_not_of(' ') + 1);
    if (!name.empty()) names.emplace(name);
  }
  return names;
}

void RequireKnownNames(const LeftOut& names, std::span<const char* const> patterns) {
  LeftOut known(patterns.begin(), patterns.end());
  for (const ConvRow* const row : ConvTable()) {
    Require(!row->traits.is_reference || !names.contains(row->name), kVariable, " names '", row->name,
            "', which computes what no other kernel does; leave it in");
    if (!row->traits.is_reference) known.insert(row->name);
  }
  for (const KernelInfo* const row : FusedTable()) known.insert(row->name);
  for (const ConvOption& option : ConvOptions()) known.insert(option.name);
  for (const std::string& name : names)
    Require(known.contains(name), kVariable, " names '", name, "', expected some of ", Joined(known, ", "));
}

const LeftOut& LeftOutHere() {
  static const LeftOut names = [] {
    const char* const text = std::getenv(kVariable.data());
    return ParseLeftOut(text == nullptr ? "" : text);
  }();
  return names;
}

std::string LeftOutText() { return LeftOutHere().empty() ? "" : ", without " + Joined(LeftOutHere(), ","); }

}  // namespace lowbit::cuda
