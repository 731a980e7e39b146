#include "ep/cuda/packed_sequence.h"

#include <algorithm>

#include "core/node_reader.h"

namespace lowbit::ep {
namespace {

class SequencePlan final : public cuda::NodePlan {
 public:
  SequencePlan(std::shared_ptr<const cuda::NodePlan> first, std::shared_ptr<const cuda::NodePlan> second,
               const TensorShape& between)
      : first_(std::move(first)), second_(std::move(second)) {
    constexpr size_t kAlignment = 256;
    const size_t bytes = static_cast<size_t>(ElementCount(between.dims)) * ElementSize(between.type);
    scratch_at_ = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // The tensor between the two, then what either launch needs.
  size_t WorkspaceBytes() const override {
    return scratch_at_ + std::max(first_->WorkspaceBytes(), second_->WorkspaceBytes());
  }
  std::string Text() const override { return first_->Text() + " + " + second_->Text(); }

  void Launch(std::span<const void* const> fed, void* y, void* workspace, cuda::Queue& queue) const override {
    void* const scratch = static_cast<uint8_t*>(workspace) + scratch_at_;
    first_->Launch(fed.first(1), workspace, scratch, queue);
    std::vector<const void*> second_fed(fed.begin(), fed.end());
    second_fed[0] = workspace;
    second_->Launch(second_fed, y, scratch, queue);
  }

 private:
  const std::shared_ptr<const cuda::NodePlan> first_, second_;
  size_t scratch_at_ = 0;
};

}  // namespace

std::shared_ptr<const cuda::NodePlan> PackedSequence::Plan(std::span<const TensorShape> fed,
                                                           const TensorShape& y) const {
  std::vector<TensorShape> second_fed(fed.begin(), fed.end());
  second_fed.at(0) = between_(fed[0]);
  return std::make_shared<const SequencePlan>(first_->Plan(fed.first(1), second_fed[0]),
                                              second_->Plan(second_fed, y), second_fed[0]);
}

}  // namespace lowbit::ep
