// From nodes as plain data to their kernels.
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

class FunctionPlan final : public NodePlan {
 public:
  FunctionPlan(std::string text, LaunchFunction launch, size_t workspace_bytes)
      : text_(std::move(text)), launch_(std::move(launch)), workspace_bytes_(workspace_bytes) {}
  size_t WorkspaceBytes() const override { return workspace_bytes_; }
  void Launch(std::span<const void* const> fed, void* y, void* workspace, Queue& queue) const override {
    launch_({fed, y, workspace, queue, text_});
  }
  std::string Text() const override { return text_; }

 private:
  std::string text_;
  LaunchFunction launch_;
  size_t workspace_bytes_;
};

class FunctionNode final : public PackedNode {
 public:
  FunctionNode(PlanFunction plan, std::shared_ptr<const DeviceMemory> constants,
               std::optional<size_t> overwrites)
      : plan_(std::move(plan)), constants_(std::move(constants)), overwrites_(overwrites) {}
  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    for (const TensorShape& tensor : fed) CountOf(tensor.dims);
    CountOf(y.dims);
    return Hold(plan_(fed, y), constants_);
  }
  std::optional<size_t> Overwrites() const override { return overwrites_; }

 private:
  PlanFunction plan_;
  std::shared_ptr<const DeviceMemory> constants_;
  std::optional<size_t> overwrites_;
};

class StoringNode final : public PackedNode {
 public:
  StoringNode(StoringPlanFunction plan, const Device& device, StoredChannels stored = {})
      : plan_(std::move(plan)), device_(device), stored_(std::move(stored)) {}
  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    for (const TensorShape& tensor : fed) CountOf(tensor.dims);
    CountOf(y.dims);
    return Hold(plan_(fed.first(fed.size() - stored_.Count()), y, stored_), stored_.Tables());
  }
  // They make as many channels as they are fed.
  bool MayStore(Shapes fed, std::span<const ChannelMove> moves) const override {
    return fed[0].dims.back() % 16 == 0 && StoredChannels::Fit(moves);
  }
  PackedNodePtr Storing(std::span<const ChannelMove> moves, bool keeps_output) const override {
    return std::make_unique<StoringNode>(plan_, device_, StoredChannels(moves, keeps_output, device_));
  }

 private:
  StoringPlanFunction plan_;
  Device device_;
  StoredChannels stored_;
};

PackedNodePtr Pack(const MatmulNode&, const Device&) { Fail("a matrix product is packed by PackMatmul"); }
PackedNodePtr Pack(const NormalizationNode&, const Device&) {
  Fail("LowBitNormalization has no kernel for GPUs yet");
}

}  // namespace

NodePlanPtr MakePlan(std::string text, LaunchFunction launch, size_t workspace_bytes) {
  return std::make_shared<FunctionPlan>(std::move(text), std::move(launch), workspace_bytes);
}

NodePlanPtr Hold(NodePlanPtr plan, std::shared_ptr<const DeviceMemory> constants) {
  if (constants == nullptr) return plan;
  const auto both = std::make_shared<std::pair<NodePlanPtr, std::shared_ptr<const DeviceMemory>>>(
      std::move(plan), std::move(constants));
  return {both, both->first.get()};
}

PackedNodePtr MakeNode(PlanFunction plan, std::shared_ptr<const DeviceMemory> constants,
                       std::optional<size_t> overwrites) {
  return std::make_unique<FunctionNode>(std::move(plan), std::move(constants), overwrites);
}

NodePlanPtr PlanInTurn(const NodePlanPtr& first, const NodePlanPtr& second, int64_t between_bytes) {
  const auto scratch_at = static_cast<size_t>(BlocksFor(between_bytes, 256)) * 256;
  const auto launch = [first, second, scratch_at](const Run& run) {
    void* const scratch = static_cast<uint8_t*>(run.workspace) + scratch_at;
    const void* const second_fed[] = {run.fed.back(), run.workspace};
    first->Launch(run.fed.first(1), run.workspace, scratch, run.queue);
    second->Launch(std::span(second_fed).last(run.fed.size()), run.y, scratch, run.queue);
  };
  return MakePlan(first->Text() + " + " + second->Text(), launch,
                  scratch_at + std::max(first->WorkspaceBytes(), second->WorkspaceBytes()));
}

int64_t BytesOfFloats(const TensorShape& tensor) {
  return CountOf(tensor.dims) * static_cast<int64_t>(sizeof(float));
}

NodePlanPtr PlanAdd(Shapes operands, const TensorShape& y, const Limits& limits, const Device& device) {
  NodePlanPtr add = Pack(FloatBinaryOp{FloatBinaryKind::kAdd}, device)->Plan(operands, y);
  const bool clips = limits.low > -std::numeric_limits<float>::infinity() ||
                     limits.high < std::numeric_limits<float>::infinity();
  if (!clips) return add;
  const NodePlanPtr clip = Pack(UnaryOp{UnaryKind::kClip, limits.low, limits.high}, device)->Plan({&y, 1}, y);
  const auto launch = [=](const Run& run) {
    add->Launch(run.fed, run.y, nullptr, run.queue);
    const void* const sums[] = {run.y};
    clip->Launch(sums, run.y, nullptr, run.queue);
  };
  return MakePlan(add->Text() + " + " + clip->Text(), launch);
}

namespace {

// A product whose limits add what is fed behind x.
class AddedNode final : public PackedNode {
 public:
  AddedNode(StandardNode node, std::shared_ptr<const PackedNode> product, const Limits& limits, Device device)
      : node_(std::move(node)), product_(std::move(product)), limits_(limits), device_(std::move(device)) {}

  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    const TensorShape made = OutputOf(node_, fed.first(1));
    if (fed[1].dims == made.dims) return product_->Plan(fed, made);
    const TensorShape operands[] = {fed[1], made};
    return PlanInTurn(product_->Plan(fed.first(1), made), PlanAdd(operands, y, limits_, device_),
                      BytesOfFloats(made));
  }
  std::optional<size_t> Overwrites() const override { return 1; }
  bool MayReadChannelsLast(Shapes fed, size_t i) const override {
    return IsOneKernel(fed) ? product_->MayReadChannelsLast(fed, i)
                            : i == 0 && product_->MayReadChannelsLast(fed.first(1), 0);
  }
  bool MayMakeChannelsLast(Shapes fed) const override {
    return IsOneKernel(fed) && product_->MayMakeChannelsLast(fed);
  }
  bool TurnsChannelsLast(Shapes fed, size_t i) const override {
    return i == 0 && product_->TurnsChannelsLast(fed.first(1), i);
  }
  PackedNodePtr InChannelsLast(const ChannelsLast& last) const override {
    return std::make_unique<AddedNode>(node_, product_->InChannelsLast(last), limits_, device_);
  }

 private:
  bool IsOneKernel(Shapes fed) const { return fed[1].dims == OutputOf(node_, fed.first(1)).dims; }

  StandardNode node_;
  std::shared_ptr<const PackedNode> product_;
  Limits limits_;
  Device device_;
};

}  // namespace

PackedNodePtr PackWithAdd(const StandardNode& node, PackedNodePtr product, const Limits& limits,
                          const Device& device) {
  return std::make_unique<AddedNode>(node, std::move(product), limits, device);
}

StoredChannels::StoredChannels(std::span<const ChannelMove> moves, bool keeps_output, const Device& device) {
  places_.keeps_output = keeps_output;
  std::vector<uint8_t> tables;
  for (const ChannelMove& move : moves) tables.insert(tables.end(), move.table.begin(), move.table.end());
  if (!tables.empty()) {
    const DeviceGuard guard(device.ordinal);
    auto memory = std::make_shared<DeviceMemory>();
    memory->Upload(tables.data(), tables.size(), device);
    tables_ = std::move(memory);
  }
  size_t at = 0;
  for (const ChannelMove& move : moves) {
    const uint8_t* const table = move.table.empty() ? nullptr : tables_->At(at);
    places_.list.push_back({move.first, move.count, move.at, move.channels, table, move.rounding});
    at += move.table.size();
  }
}

bool StoredChannels::Fit(std::span<const ChannelMove> moves) {
  return moves.size() <= kMostPlaces && std::all_of(moves.begin(), moves.end(), [](const ChannelMove& move) {
           return (move.first | move.count | move.at | move.channels) % 16 == 0 && !move.rounding;
         });
}

bool StoredChannels::FitFloats(std::span<const ChannelMove> moves) {
  return moves.size() <= kMostPlaces && std::all_of(moves.begin(), moves.end(), [](const ChannelMove& move) {
           return move.rounding.has_value();
         });
}

std::string StoredChannels::Text() const {
  if (places_.list.empty()) return "";
  std::string text = places_.keeps_output ? " stores" : " moves";
  for (const ConvPlace& place : places_.list) {
    text += " " + std::to_string(place.first) + "+" + std::to_string(place.count) + ">" +
            std::to_string(place.at) + "/" + std::to_string(place.channels) +
            (place.table != nullptr ? "t" : "") + (place.rounding ? "r" : "");
  }
  return text;
}

PackedNodePtr MakeStoringNode(StoringPlanFunction plan, const Device& device) {
  return std::make_unique<StoringNode>(std::move(plan), device);
}

std::shared_ptr<const DeviceMemory> NodeConstants::Upload(const Device& device) const {
  if (bytes_.empty()) return nullptr;
  const DeviceGuard guard(device.ordinal);
  auto memory = std::make_shared<DeviceMemory>();
  memory->Upload(bytes_.data(), bytes_.size(), device);
  for (const auto& set : set_) set(*memory);
  return memory;
}

int64_t CountOf(std::span<const int64_t> dims) {
  constexpr int64_t kMaxElements = (int64_t{1} << 31) - 1;
  int64_t count = 1;
  for (const int64_t dim : dims) {
    Require(dim >= 0, "a dim of ", dim, ", expected 0 or more");
    if (dim == 0) return 0;
    Require(dim <= kMaxElements / count, "a tensor of more than ", kMaxElements,
            " elements, the most that the GPU kernels count; run with a smaller batch or image");
    count *= dim;
  }
  return count;
}

PackedNodePtr PackNode(const NodeSpec& node, const Device& device) {
  return std::visit([&](const auto& kind) { return Pack(kind, device); }, node);
}

namespace {

template <typename Node>
constexpr bool kIsProduct = std::is_same_v<Node, FloatGemmOp> || std::is_same_v<Node, FloatMatmulOp> ||
                            std::is_same_v<Node, FloatConvOp>;

}  // namespace

Limits LimitsOf(const StandardNode& activation) {
  const auto* const unary = std::get_if<UnaryOp>(&activation);
  const bool clips = unary != nullptr && unary->kind == UnaryKind::kClip;
  Require(clips || (unary != nullptr && unary->kind == UnaryKind::kRelu),
          "a float product is fused with a Relu or a Clip alone");
  Limits limits;
  limits.low = clips ? unary->a : 0;
  if (clips) limits.high = unary->b;
  return limits;
}

PackedNodePtr PackStandard(const StandardNode& node, const Device& device, FloatPrecision precision) {
  const auto pack = [&](const auto& kind) {
    using Kind = std::decay_t<decltype(kind)>;
    if constexpr (kIsProduct<Kind>) {
      return Pack(kind, device, precision);
    } else if constexpr (std::is_same_v<Kind, FloatPoolOp>) {
      PackedNodePtr pool = Pack(kind, device);
      return UsesTensorCores(precision) ? PackNhwcPool(kind, precision, std::move(pool)) : std::move(pool);
    } else {
      return Pack(kind, device);
    }
  };
  return std::visit(pack, node);
}

bool FusesQuantize(const QuantizeNode& quantize) {
  return quantize.grids.size() == 1 && !quantize.to_channels_last;
}

bool FusesPool(const TransposeOp& transpose, const FloatPoolOp& pool) {
  const auto rank = static_cast<int64_t>(transpose.perm.size());
  if (rank < 3 ||
      (pool.kind != FloatPoolOp::Kind::kGlobalMax && pool.kind != FloatPoolOp::Kind::kGlobalAverage)) {
    return false;
  }
  std::vector<int64_t> to_front = {0, rank - 1};
  for (int64_t i = 1; i < rank - 1; ++i) to_front.push_back(i);
  return transpose.perm == to_front;
}

PackedNodePtr PackAdded(const StandardNode& product, const StandardNode* activation, const Device& device,
                        FloatPrecision precision) {
  Limits limits = activation != nullptr ? LimitsOf(*activation) : Limits{};
  limits.adds = true;
  const auto pack = [&](const auto& kind) -> PackedNodePtr {
    using Op = std::decay_t<decltype(kind)>;
    if constexpr (std::is_same_v<Op, FloatGemmOp> || std::is_same_v<Op, FloatConvOp>) {
      return PackWithAdd(WithoutConstants(kind), Pack(kind, device, precision, limits), limits, device);
    } else {
      Fail("a tensor is added to the sums of a float product with constant weights alone");
    }
  };
  return std::visit(pack, product);
}

bool FusesQuantize(const StandardNode& conv, const QuantizeNode& quantize, FloatPrecision precision) {
  return !UsesTensorCores(precision) && quantize.grids.size() == 1 && quantize.to_channels_last &&
         MayMakeCodes(std::get<FloatConvOp>(conv), quantize.grids.front());
}

PackedNodePtr PackQuantized(const StandardNode& conv, const StandardNode* activation,
                            const QuantizeNode& quantize, const Device& device, FloatPrecision precision) {
  Require(FusesQuantize(conv, quantize, precision),
          "a float convolution makes codes of few channels for one grid");
  const auto& op = std::get<FloatConvOp>(conv);
  const Limits limits = activation == nullptr ? Limits() : LimitsOf(*activation);
  const std::shared_ptr<const PackedNode> product = PackToCodes(op, device, limits, quantize.grids.front()),
                                          quantized = Pack(quantize, device);
  return MakeNode([=, op = WithoutConstants(op)](Shapes fed, const TensorShape& y) {
    const TensorShape made = OutputOf(StandardNode(op), fed);
    NodePlanPtr plan = product->Plan(fed, made);
    if (MakesCodes(op, fed[0], made, device)) return plan;
    return PlanInTurn(plan, quantized->Plan({&made, 1}, y), BytesOfFloats(made));
  });
}

PackedNodePtr PackActivated(const StandardNode& product, const StandardNode& activation, const Device& device,
                            FloatPrecision precision) {
  const Limits limits = LimitsOf(activation);
  const auto pack = [&](const auto& kind) -> PackedNodePtr {
    if constexpr (kIsProduct<std::decay_t<decltype(kind)>>) {
      return Pack(kind, device, precision, limits);
    } else {
      Fail("a Relu or a Clip is fused with a float product alone");
    }
  };
  return std::visit(pack, product);
}

}  // namespace lowbit::cuda
