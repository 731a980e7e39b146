#include "ep/cuda/cuda_backend.h"

#include <algorithm>
#include <array>
#include <functional>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "core/node_reader.h"
#include "core/nodes.h"
#include "core/nodes/standard_nodes.h"
#include "core/processors.h"
#include "core/status.h"
#include "ep/cuda/cuda_call.h"
#include "ep/cuda/fusions.h"
#include "ep/cuda/graph_instance.h"
#include "ep/cuda/steps.h"
#include "ep/cuda/tuner.h"
#include "ep/region/lower.h"
#include "ep/region/moves.h"
#include "kernels/cuda/left_out.h"

namespace lowbit::ep {
namespace {

// Runs that may be under way at once with the same shapes. Each has a workspace of its own; more than a few
// of them do not make a GPU faster that one region fills.
constexpr size_t kMaxInstances = 4;

bool IsLowBit(const Node& node) { return node.domain == kDomain; }
// Nodes, each of which has a kernel, that may be one step though the first is no lowbit node.
enum class FloatGroup : uint8_t {
  kNone,
  kActivated,  // a product and what cuts its sums off
  kAdded,      // a product, the addition of another tensor, and what cuts that off or nothing
  kCoded,      // a convolution, what cuts its sums off or nothing, and a quantizer
  kQuantized,  // an operation on two tensors and a quantizer of its result as it lies
  kPooled,     // an image whose channels come first for a global pool alone
};

FloatGroup FloatGroupOf(std::span<const Node* const> nodes) {
  if (nodes.size() < 2 || nodes.size() > 3 || IsLowBit(*nodes[0])) return FloatGroup::kNone;
  const auto is = [](const Node& node, std::initializer_list<std::string_view> ops) {
    return std::find(ops.begin(), ops.end(), node.op) != ops.end();
  };
  const Node &first = *nodes[0], &next = *nodes[1];
  const bool is_product = is(first, {"Conv", "Gemm", "MatMul"}),
             cuts_off = is(*nodes.back(), {"Relu", "Clip"});
  if (is_product && is(next, {"Add"}) && (nodes.size() == 2 || cuts_off)) return FloatGroup::kAdded;
  const bool quantizes = nodes.back()->op == "LowBitQuantize";
  if (is(first, {"Conv"}) && quantizes && (nodes.size() == 2 || is(next, {"Relu", "Clip"})))
    return FloatGroup::kCoded;
  if (nodes.size() != 2) return FloatGroup::kNone;
  if (IsLowBit(next)) {
    return is(first, {"Add", "Sub", "Mul", "Div"}) && quantizes ? FloatGroup::kQuantized : FloatGroup::kNone;
  }
  if (is_product && cuts_off) return FloatGroup::kActivated;
  const bool pools = first.op == "Transpose" && is(next, {"GlobalAveragePool", "GlobalMaxPool"});
  return pools ? FloatGroup::kPooled : FloatGroup::kNone;
}

// A product to float32, the addition that reads it and what cuts off the sum, if anything does.
struct FloatSum {
  MatmulNode product;
  FloatBinaryOp add;
  std::optional<UnaryOp> activation;
};

// nullopt for other nodes. Terms that are constants would have few numbers for many.
std::optional<FloatSum> FloatSumOf(const Graph& graph, std::span<const Node* const> nodes, Weights weights) {
  const bool has_activation = nodes.size() == 3;
  if ((nodes.size() != 2 && !has_activation) || !IsLowBit(*nodes[0]) || IsLowBit(*nodes[1]) ||
      nodes[1]->op != "Add" || cuda::IsLeftOut(kFloatSum)) {
    return std::nullopt;
  }
  if (has_activation && (IsLowBit(*nodes[2]) || (nodes[2]->op != "Relu" && nodes[2]->op != "Clip")))
    return std::nullopt;
  const auto is_constant = [&](ValueId id) {
    return graph.values[static_cast<size_t>(id)].constant.has_value();
  };
  if (std::any_of(nodes[1]->inputs.begin(), nodes[1]->inputs.end(), is_constant)) return std::nullopt;
  NodeSpec product = DecodeLowBit(graph, *nodes[0], weights);
  auto* const matmul = std::get_if<MatmulNode>(&product);
  if (matmul == nullptr) return std::nullopt;
  FloatSum sum{std::move(*matmul), std::get<FloatBinaryOp>(ReadStandard(graph, *nodes[1])), std::nullopt};
  if (has_activation) sum.activation = std::get<UnaryOp>(ReadStandard(graph, *nodes[2]));
  if (!cuda::FusesFloatSum(sum.product, sum.add, sum.activation)) return std::nullopt;
  return sum;
}

// Why a node that means something has no kernel here.
std::optional<std::string> WithoutKernel(const NodeSpec& node) {
  if (std::holds_alternative<NormalizationNode>(node)) {
    return "LowBitNormalization has no kernel for GPUs yet";
  }
  const auto* const matmul = std::get_if<MatmulNode>(&node);
  if (matmul != nullptr && matmul->layout.spatial == 3) return "3-D convolutions have no kernel for GPUs yet";
  const auto* const max_pool = std::get_if<MaxPoolNode>(&node);
  const auto* const average_pool = std::get_if<AveragePoolNode>(&node);
  if ((max_pool != nullptr && max_pool->window.spatial == 3) ||
      (average_pool != nullptr && average_pool->window.spatial == 3)) {
    return "3-D pools have no kernel for GPUs yet";
  }
  const auto* const resize = std::get_if<ResizeNode>(&node);
  if (resize != nullptr && resize->mode != ResizeNode::Mode::kNearest) {
    return "LowBitResize has a kernel for GPUs in mode nearest alone";
  }
  return std::nullopt;
}

// Partitioning refuses such nodes, but a compiled model may hold what no partitioning has seen.
void RequireKernel(const NodeSpec& node) {
  if (const std::optional<std::string> reason = WithoutKernel(node)) Fail(*reason);
}

Weights NeededBeside(std::span<const uint8_t> packed) {
  return packed.empty() ? Weights::kNeeded : Weights::kMayBeMissing;
}

// The nodes as patterns see them.
std::vector<FusedNode> AsFused(std::span<const Node* const> nodes) {
  std::vector<FusedNode> out;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (!IsLowBit(*nodes[i])) return {};
    Reads reads = Reads::kInput;
    if (i > 0) {
      const std::vector<ValueId>& inputs = nodes[i]->inputs;
      const auto at = std::find(inputs.begin(), inputs.end(), nodes[i - 1]->outputs[0]);
      reads = at == inputs.begin() ? Reads::kInput : at == inputs.end() ? Reads::kNothing : Reads::kResidual;
    }
    out.push_back({nodes[i]->op, reads});
  }
  return out;
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(std::shared_ptr<CudaDevice> device, const EpOptions& options)
      : device_(std::move(device)),
        use_graph_(options.graph),
        reference_(options.reference),
        float_regions_(options.float_regions),
        float_precision_(options.float_precision),
        tuner_(std::make_shared<Tuner>(device_, options)) {}

  std::optional<std::string> Refusal(const Graph& graph, const Node& node) const override {
    try {
      if (IsLowBit(node)) {
        return WithoutKernel(DecodeLowBit(graph, node));
      } else {
        static_cast<void>(ReadStandard(graph, node));
      }
      return std::nullopt;
    } catch (const std::exception& e) {
      return e.what();
    }
  }

  bool Fuses(const Graph& graph, std::span<const Node* const> nodes, const Node& next) const override {
    if (reference_) return false;
    std::vector<const Node*> all(nodes.begin(), nodes.end());
    all.push_back(&next);
    try {
      switch (FloatGroupOf(all)) {
        case FloatGroup::kActivated:
          return true;
        case FloatGroup::kAdded:
          return !std::holds_alternative<FloatMatmulOp>(ReadStandard(graph, *all[0]));
        case FloatGroup::kCoded:
          return cuda::FusesQuantize(ReadStandard(graph, *nodes[0]),
                                     std::get<QuantizeNode>(DecodeLowBit(graph, next)), float_precision_);
        case FloatGroup::kQuantized:
          return cuda::FusesQuantize(std::get<QuantizeNode>(DecodeLowBit(graph, next)));
        case FloatGroup::kPooled:
          return cuda::FusesPool(std::get<TransposeOp>(ReadStandard(graph, *nodes[0])),
                                 std::get<FloatPoolOp>(ReadStandard(graph, next)));
        case FloatGroup::kNone:
          break;
      }
      if (FloatSumOf(graph, all, Weights::kMayBeMissing)) return true;
      const Fusion* const fusion = FindFusion(AsFused(all));
      return fusion != nullptr &&
             fusion->fits(DecodeAll(graph, all, *fusion, Weights::kMayBeMissing), device_->Properties());
    } catch (const Error&) {
      return false;  // CreateStep says why
    }
  }

  std::unique_ptr<Step> CreateStep(const Graph& graph, std::span<const Node* const> nodes,
                                   std::span<const uint8_t> packed) override {
    const auto create = [&] {
      if (const Fusion* const fusion = FindFusion(AsFused(nodes)))
        return CreateFused(graph, nodes, *fusion, packed);
      switch (FloatGroupOf(nodes)) {
        case FloatGroup::kActivated:
          return CreateActivated(graph, *nodes[0], *nodes[1]);
        case FloatGroup::kAdded:
          return CreateAdded(graph, *nodes[0], nodes.size() > 2 ? nodes[2] : nullptr);
        case FloatGroup::kCoded:
          return CreateCoded(graph, nodes);
        case FloatGroup::kQuantized:
          return CreateQuantized(graph, *nodes[0], *nodes[1]);
        case FloatGroup::kPooled:
          return CreatePooled(graph, *nodes[0], *nodes[1]);
        case FloatGroup::kNone:
          break;
      }
      if (auto sum = FloatSumOf(graph, nodes, NeededBeside(packed)))
        return CreateFloatSum(std::move(*sum), packed);
      Require(nodes.size() == 1, "no step is of these ", nodes.size(), " nodes; compile the model again");
      return IsLowBit(*nodes[0]) ? CreateLowBit(graph, *nodes[0], packed) : CreateStandard(graph, *nodes[0]);
    };
    try {
      return create();
    } catch (const Error&) {
      // The kernels' constants are allocated beside the arena, whose reserve may be what is missing.
      if (device_->Memory().ReleaseReserve() == 0) throw;
      return create();
    }
  }

  // Opening is theirs, whatever threads runs have: a ResNet-50 with tails in float takes 296 ms with eight and
  // took 793 with one, on 16 cores beside an H100 (benchmarks/results/gpu_forms.md). More were not tried. ONNX
  // Runtime tells no execution provider how many threads its session was given.
  size_t Creators() const override {
    constexpr size_t kMost = 8;
    return std::min(UsableProcessors(), kMost);
  }

  // What the fast kernels read and write at once.
  int64_t ChannelMultiple() const override { return reference_ || cuda::IsLeftOut(kPaddedChannels) ? 1 : 16; }

  bool TakesFloatRegions() const override { return float_regions_; }

  std::unique_ptr<Step> CreateCopy() override {
    return std::make_unique<CudaStep>(cuda::PackCopy(device_->Properties()),
                                      [](std::span<const TensorShape> fed) { return fed[0]; });
  }

  std::shared_ptr<const StepPlan> PlanTogether(std::span<const FedStep> steps) override {
    return tuner_->PlanTogether(steps);
  }
  std::shared_ptr<const StepPlan> PlanBlocks(std::span<const FedStep> steps) override {
    return tuner_->PlanBlocks(steps);
  }

  bool MayStore(const Step& step, std::span<const TensorShape> fed,
                std::span<const ChannelMove> moves) const override {
    return !reference_ && !cuda::IsLeftOut(kStoredChannels) &&
           static_cast<const CudaStep&>(step).Node().MayStore(fed, moves);
  }
  std::unique_ptr<const Step> Storing(const Step& step, std::span<const ChannelMove> moves,
                                      bool keeps_output) const override {
    return static_cast<const CudaStep&>(step).Storing(moves, keeps_output);
  }

  int PlanesRead(const Step& step) const override {
    const bool may = !reference_ && !cuda::IsLeftOut(kPlanes);
    return may ? static_cast<const CudaStep&>(step).Node().PlanesRead() : 0;
  }
  bool AddsPlanes(const Step& step, int planes) const override {
    return static_cast<const CudaStep&>(step).Node().AddsPlanes(planes);
  }
  bool KeepsPlanes(const Step& step) const override {
    return static_cast<const CudaStep&>(step).Node().KeepsPlanes();
  }
  std::optional<double> Microseconds(const Step& step, std::span<const TensorShape> fed,
                                     const TensorPlanes& planes) const override {
    return static_cast<const CudaStep&>(step).Node().Microseconds(fed, planes);
  }
  std::unique_ptr<const Step> InPlanes(const Step& step, const TensorPlanes& planes) const override {
    return static_cast<const CudaStep&>(step).InPlanes(planes);
  }

  bool MayReadChannelsLast(const Step& step, std::span<const TensorShape> fed, size_t i) const override {
    return MayLieOtherwise(step) && static_cast<const CudaStep&>(step).Node().MayReadChannelsLast(fed, i);
  }
  bool MayMakeChannelsLast(const Step& step, std::span<const TensorShape> fed) const override {
    return MayLieOtherwise(step) && static_cast<const CudaStep&>(step).Node().MayMakeChannelsLast(fed);
  }
  bool KeepsOrder(const Step& step) const override {
    return static_cast<const CudaStep&>(step).Node().KeepsOrder();
  }
  bool TurnsChannelsLast(const Step& step, std::span<const TensorShape> fed, size_t i) const override {
    return !reference_ && !cuda::IsLeftOut(kChannelsLast) &&
           static_cast<const CudaStep&>(step).Node().TurnsChannelsLast(fed, i);
  }
  std::unique_ptr<Step> CreateTurn() override {
    return std::make_unique<CudaStep>(cuda::PackTurn(float_precision_),
                                      [](std::span<const TensorShape> fed) { return fed[0]; });
  }
  size_t BytesOfChannelsLast() const override {
    return float_precision_ == FloatPrecision::kFloat16 ? sizeof(uint16_t) : sizeof(float);
  }
  std::unique_ptr<const Step> InChannelsLast(const Step& step, const ChannelsLast& last) const override {
    return static_cast<const CudaStep&>(step).InChannelsLast(last);
  }

  std::vector<size_t> PackedInputs(const Graph& graph, const Node& node) const override {
    if (!IsLowBit(node)) return {};
    try {
      const LowBitInputs inputs = ReadLowBit(graph, node);
      const std::vector<InputSchema>& names = inputs.schema->inputs;
      const auto weights = std::find_if(names.begin(), names.end(), [](const InputSchema& input) {
        return std::string_view(input.name) == "w";
      });
      if (weights == names.end()) return {};
      return {static_cast<size_t>(weights - names.begin())};
    } catch (const Error&) {
      return {};
    }
  }

  DeviceConstant Upload(const ConstTensor& tensor) override {
    const size_t bytes = static_cast<size_t>(ElementCount(tensor.shape)) * ElementSize(tensor.type);
    if (device_->Properties().IsAbsent()) {
      const auto* from = static_cast<const uint8_t*>(tensor.data);
      auto copy = std::make_shared<std::vector<uint8_t>>(from, from + bytes);
      return {copy, copy->data()};
    }
    auto block = std::make_shared<DeviceBlock>(device_, bytes);
    const DeviceScope scope(device_->Ordinal());
    const cudaStream_t stream = device_->CopyStream();
    CheckCuda(cudaMemcpyAsync(block->Get(), tensor.data, bytes, cudaMemcpyHostToDevice, stream),
              "copying a constant");
    CheckCuda(cudaStreamSynchronize(stream), "copying a constant");
    return {block, block->Get()};
  }

  std::unique_ptr<Instance> CreateInstance(const RegionPlan& plan) override {
    Require(!device_->Properties().IsAbsent(), "models are compiled for ", device_->Properties().name,
            " here, none can run: there is no such GPU");
    return std::make_unique<GraphInstance>(plan, device_, use_graph_);
  }

  void Tune(RegionPlan& plan) override { tuner_->TuneTogether(plan); }
  void ChooseLayout(RegionPlan& plan, const std::function<RegionPlan(PlaneUse)>& make) override {
    tuner_->ChooseLayout(plan, make);
  }
  size_t Alignment() const override { return 256; }
  size_t MaxInstances() const override { return kMaxInstances; }

  std::string Fingerprint() const override {
    return "cuda sm_" + std::to_string(device_->Properties().capability) + ", " +
           CudaTuneOrigin(device_->Properties()).build +
           (reference_ ? ", reference" : "");  // it fuses nothing
  }
  std::string TunedChoices() const override { return tuner_->Choices(); }
  void AdoptTunedChoices(const std::string& text) override { tuner_->Adopt(text); }

 private:
  // Whether the step's float tensors may lie in another order, or as float16.
  bool MayLieOtherwise(const Step& step) const {
    return !reference_ && !cuda::IsLeftOut(kChannelsLast) &&
           (!KeepsOrder(step) || BytesOfChannelsLast() != sizeof(float));
  }

  static std::vector<NodeSpec> DecodeAll(const Graph& graph, std::span<const Node* const> nodes,
                                         const Fusion& fusion, Weights weights) {
    std::vector<NodeSpec> specs;
    for (size_t i = 0; i < nodes.size(); ++i) {
      specs.push_back(DecodeLowBit(graph, *nodes[i], weights));
      if (fusion.nodes[i].part != Part::kLookup) continue;
      std::optional<LookupNode> lookup = AsLookup(specs.back());
      Require(lookup.has_value(), Where(*nodes[i]), " has a table for each channel, ", fusion.name,
              " one alone");
      specs.back() = std::move(*lookup);
    }
    return specs;
  }

  std::unique_ptr<Step> CreateFused(const Graph& graph, std::span<const Node* const> nodes,
                                    const Fusion& fusion, std::span<const uint8_t> packed) {
    std::vector<NodeSpec> specs = DecodeAll(graph, nodes, fusion, NeededBeside(packed));
    for (const NodeSpec& spec : specs) RequireKernel(spec);
    auto packed_node = fusion.pack(specs, device_->Properties(), *tuner_, packed);
    // Tuning tells chains by it.
    std::string key;
    for (NodeSpec& spec : specs) {
      if (const auto* const matmul = std::get_if<MatmulNode>(&spec))
        key += (key.empty() ? "" : ", ") + DescribeForTuning(matmul->conv, "", false);
      if (std::holds_alternative<LookupNode>(spec)) key += ", mapped";
      DropWeights(spec);
    }
    return std::make_unique<CudaStep>(
        std::move(packed_node),
        [specs = std::move(specs), &fusion](std::span<const TensorShape> fed) {
          return OutputOfFused(specs, fusion, fed);
        },
        std::move(key));
  }

  std::unique_ptr<Step> CreateLowBit(const Graph& graph, const Node& node, std::span<const uint8_t> packed) {
    NodeSpec spec = DecodeLowBit(graph, node, NeededBeside(packed));
    RequireKernel(spec);
    std::unique_ptr<cuda::PackedNode> packed_node;
    std::string key;
    if (const auto* const matmul = std::get_if<MatmulNode>(&spec)) {
      packed_node =
          cuda::PackMatmul(*matmul, device_->Properties(), tuner_->ChooserFor(matmul->conv), packed);
      key = DescribeForTuning(matmul->conv, "", false);
    } else {
      packed_node = cuda::PackNode(spec, device_->Properties());
    }
    DropWeights(spec);
    return std::make_unique<CudaStep>(
        std::move(packed_node),
        [spec = std::move(spec)](std::span<const TensorShape> fed) { return OutputOf(spec, fed); },
        std::move(key));
  }

  std::unique_ptr<Step> CreateStandard(const Graph& graph, const Node& node) {
    StandardNode spec = ReadStandard(graph, node);
    auto packed_node = cuda::PackStandard(spec, device_->Properties(), float_precision_);
    return StepOf(std::move(packed_node), std::move(spec));
  }

  static std::unique_ptr<Step> StepOf(std::unique_ptr<cuda::PackedNode> packed_node, StandardNode spec) {
    DropWeights(spec);
    return std::make_unique<CudaStep>(
        std::move(packed_node),
        [spec = std::move(spec)](std::span<const TensorShape> fed) { return OutputOf(spec, fed); });
  }

  // An activation changes no shape.
  std::unique_ptr<Step> CreateActivated(const Graph& graph, const Node& node, const Node& activation) {
    StandardNode spec = ReadStandard(graph, node);
    auto packed_node =
        cuda::PackActivated(spec, ReadStandard(graph, activation), device_->Properties(), float_precision_);
    return StepOf(std::move(packed_node), std::move(spec));
  }

  std::unique_ptr<Step> CreateAdded(const Graph& graph, const Node& product, const Node* activation) {
    StandardNode spec = ReadStandard(graph, product);
    std::optional<StandardNode> cut;
    if (activation != nullptr) cut = ReadStandard(graph, *activation);
    auto packed_node = cuda::PackAdded(spec, cut ? &*cut : nullptr, device_->Properties(), float_precision_);
    DropWeights(spec);
    return std::make_unique<CudaStep>(
        std::move(packed_node), [spec = std::move(spec)](std::span<const TensorShape> fed) {
          const TensorShape operands[] = {OutputOf(spec, fed.first(1)), fed[1]};
          return OutputOf(StandardNode(FloatBinaryOp{FloatBinaryKind::kAdd}), operands);
        });
  }

  std::unique_ptr<Step> CreateCoded(const Graph& graph, std::span<const Node* const> nodes) {
    StandardNode conv = ReadStandard(graph, *nodes[0]);
    std::optional<StandardNode> activation;
    if (nodes.size() > 2) activation = ReadStandard(graph, *nodes[1]);
    auto quantize = std::get<QuantizeNode>(DecodeLowBit(graph, *nodes.back()));
    auto packed_node = cuda::PackQuantized(conv, activation ? &*activation : nullptr, quantize,
                                           device_->Properties(), float_precision_);
    DropWeights(conv);
    return std::make_unique<CudaStep>(
        std::move(packed_node),
        [conv = std::move(conv), quantize = std::move(quantize)](std::span<const TensorShape> fed) {
          const TensorShape made = OutputOf(conv, fed);
          return OutputOf(NodeSpec(quantize), std::span(&made, 1));
        });
  }

  static std::unique_ptr<Step> CreateQuantized(const Graph& graph, const Node& operation,
                                               const Node& quantizer) {
    const auto spec = std::get<FloatBinaryOp>(ReadStandard(graph, operation));
    auto quantize = std::get<QuantizeNode>(DecodeLowBit(graph, quantizer));
    auto packed_node = cuda::PackQuantized(spec, quantize);
    return std::make_unique<CudaStep>(
        std::move(packed_node), [spec, quantize = std::move(quantize)](std::span<const TensorShape> fed) {
          const TensorShape made = OutputOf(StandardNode(spec), fed);
          return OutputOf(NodeSpec(quantize), std::span(&made, 1));
        });
  }

  std::unique_ptr<Step> CreateFloatSum(FloatSum sum, std::span<const uint8_t> packed) {
    RequireKernel(sum.product);
    const ConvSpec& conv = sum.product.conv;
    auto packed_node = cuda::PackFloatSum(sum.product, sum.add, sum.activation, device_->Properties(),
                                          tuner_->ChooserFor(conv, kFloatSum), packed);
    std::string key = DescribeForTuning(conv, kFloatSum, false);
    NodeSpec product = std::move(sum.product);
    DropWeights(product);
    return std::make_unique<CudaStep>(
        std::move(packed_node),
        [product = std::move(product), add = sum.add](std::span<const TensorShape> fed) {
          const std::array terms = {OutputOf(product, fed.first(1)), fed[1]};
          return OutputOf(StandardNode(add), terms);
        },
        std::move(key));
  }

  static std::unique_ptr<Step> CreatePooled(const Graph& graph, const Node& transpose, const Node& pool) {
    const auto turned = std::get<TransposeOp>(ReadStandard(graph, transpose));
    const auto pooled = std::get<FloatPoolOp>(ReadStandard(graph, pool));
    return std::make_unique<CudaStep>(cuda::PackPooled(turned, pooled),
                                      [turned, pooled](std::span<const TensorShape> fed) {
                                        const TensorShape made = OutputOf(StandardNode(turned), fed);
                                        return OutputOf(StandardNode(pooled), std::span(&made, 1));
                                      });
  }

  // They are on the device; shapes need only the geometry.
  static void DropWeights(NodeSpec& spec) {
    if (auto* const matmul = std::get_if<MatmulNode>(&spec))
      std::vector<uint8_t>().swap(matmul->conv.weights);
  }
  static void DropWeights(StandardNode& spec) {
    if (auto* const gemm = std::get_if<FloatGemmOp>(&spec)) std::vector<float>().swap(gemm->weights);
    if (auto* const conv = std::get_if<FloatConvOp>(&spec)) std::vector<float>().swap(conv->weights);
  }

  const std::shared_ptr<CudaDevice> device_;
  const bool use_graph_, reference_, float_regions_;
  const FloatPrecision float_precision_;
  const std::shared_ptr<Tuner> tuner_;
};

}  // namespace

std::shared_ptr<Backend> CreateCudaBackend(std::shared_ptr<CudaDevice> device, const EpOptions& options) {
  RequireKnownKernels();
  return std::make_shared<CudaBackend>(std::move(device), options);
}

}  // namespace lowbit::ep
