// The one place where a kernel is chosen.
#include <algorithm>
#include <string_view>

#include "core/cpu/kernel_table.h"
#include "core/status.h"

namespace lowbit {
namespace {

// Empty: the row can run this node under the cap `isa` on this machine.
std::string RefusalReason(const KernelRow& row, const ConvSpec& spec, Isa isa) {
  const bool transposed = std::string_view(row.op) == "conv_transpose";
  if (transposed != spec.geometry.transposed)
    return transposed ? "transposed only" : "not a transposed kernel";
  if (!Includes(isa, row.isa))
    return std::string("needs ") + IsaName(row.isa) + ", the cap is " + IsaName(isa);
  if (!MachineHas(row.isa)) return std::string("this machine has no ") + IsaName(row.isa);
  if (spec.x.bits > row.x_bits_max) return std::to_string(spec.x.bits) + "-bit activations";
  if (spec.w.bits > row.w_bits_max) return std::to_string(spec.w.bits) + "-bit weights";
  if (!spec.geometry.IsPlanar() && !row.volumes) return "images only, no volumes";
  return row.refuse == nullptr ? std::string() : row.refuse(spec);
}

// Where rows cost the same, the one of the higher instruction set comes first, then the one that the table
// names first.
bool Precedes(const KernelCandidate& a, const KernelCandidate& b) {
  return a.cycles != b.cycles ? a.cycles < b.cycles : a.row->isa > b.row->isa;
}

}  // namespace

KernelChoice SelectConvKernel(const ConvSpec& spec, const ConvShape& shape, Isa isa, const std::string& only,
                              const std::string& tuned) {
  KernelChoice choice;
  for (const KernelRow& row : ConvKernelTable()) {
    if (!only.empty() && only != row.name) continue;
    const std::string reason = RefusalReason(row, spec, isa);
    if (reason.empty()) {
      const KernelCandidate candidate{&row, row.cost(spec, shape)};
      choice.candidates.insert(
          std::upper_bound(choice.candidates.begin(), choice.candidates.end(), candidate, Precedes),
          candidate);
    } else {
      choice.refused.push_back(std::string(row.name) + ": " + reason);
    }
  }
  for (const KernelCandidate& candidate : choice.candidates) {
    if (tuned == candidate.row->name) {
      choice.row = candidate.row;
      choice.tuned = true;
    }
  }
  if (choice.row == nullptr && !choice.candidates.empty()) choice.row = choice.candidates.front().row;
  if (choice.row != nullptr) return choice;
  Require(only.empty() || !choice.refused.empty(), "no kernel is named '", only, "'");
  std::string reasons;
  for (const std::string& refused : choice.refused) reasons += "\n  " + refused;
  Fail(only.empty() ? "no kernel computes this node:" : "the kernel asked for does not apply:", reasons);
}

}  // namespace lowbit
