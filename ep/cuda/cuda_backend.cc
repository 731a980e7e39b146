#include "ep/cuda/cuda_backend.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "core/node_reader.h"
#include "core/nodes.h"
#include "core/standard_nodes.h"
#include "core/status.h"
#include "ep/cuda/cuda_call.h"
#include "ep/cuda/graph_instance.h"
#include "ep/cuda/packed_sequence.h"
#include "ep/cuda/steps.h"
#include "ep/cuda/tuner.h"
#include "ep/region/lower.h"

namespace lowbit::ep {
namespace {

// Runs that may be under way at once with the same shapes. Each has a workspace of its own; more than a few
// of them do not make a GPU faster that one region fills.
constexpr size_t kMaxInstances = 4;

bool IsLowBit(const Node& node) { return node.domain == kDomain; }
bool IsConv(const Node& node) { return node.op == "LowBitConv" || node.op == "APConv"; }

// Without their weights only nodes that were packed before can be made.
NodeSpec Decode(const Graph& graph, const Node& node, Weights weights = Weights::kNeeded) {
  LowBitInputs inputs = ReadLowBit(graph, node);
  if (weights == Weights::kMayBeMissing) {
    for (std::optional<ConstTensor>& constant : inputs.constants) {
      if (constant && constant->data == nullptr) constant.reset();
    }
  }
  return DecodeNode(*inputs.schema, inputs.attributes, inputs.constants, inputs.present, weights);
}

// Why a node that means something has no kernel here.
std::optional<std::string> WithoutKernel(const NodeSpec& node) {
  if (std::holds_alternative<FedMatmulNode>(node)) return "LowBitMatMul has no kernel for GPUs yet";
  if (std::holds_alternative<NormalizationNode>(node)) {
    return "LowBitNormalization has no kernel for GPUs yet";
  }
  if (std::holds_alternative<SoftmaxNode>(node)) return "LowBitSoftmax has no kernel for GPUs yet";
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

Weights NeededBeside(std::span<const uint8_t> packed) {
  return packed.empty() ? Weights::kNeeded : Weights::kMayBeMissing;
}

TensorShape OutputOfSequence(const NodeSpec& first, const NodeSpec& second,
                             std::span<const TensorShape> fed) {
  std::vector<TensorShape> between(fed.begin(), fed.end());
  between.at(0) = OutputOf(first, fed.first(1));
  return OutputOf(second, between);
}

// The same where the second reads the first's output as its residual.
TensorShape OutputOfResidualPair(const NodeSpec& first, const NodeSpec& second,
                                 std::span<const TensorShape> fed) {
  const std::array second_fed = {fed[1], OutputOf(first, fed.first(1))};
  return OutputOf(second, second_fed);
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(std::shared_ptr<CudaDevice> device, const EpOptions& options)
      : device_(std::move(device)),
        use_graph_(options.graph),
        reference_(options.reference),
        tuner_(std::make_shared<Tuner>(device_, options)) {}

  std::optional<std::string> Refusal(const Graph& graph, const Node& node) const override {
    try {
      if (IsLowBit(node)) {
        return WithoutKernel(Decode(graph, node));
      } else {
        static_cast<void>(ReadStandard(graph, node));
      }
      return std::nullopt;
    } catch (const std::exception& e) {
      return e.what();
    }
  }

  bool Fuses(const Graph& graph, std::span<const Node* const> nodes, const Node& next) const override {
    if (reference_ || !IsLowBit(*nodes[0]) || !IsLowBit(next)) return false;
    try {
      return nodes.size() == 1   ? FusesPair(graph, *nodes[0], next)
             : nodes.size() == 2 ? FusesPool(graph, *nodes[0], *nodes[1], next)
                                 : false;
    } catch (const Error&) {
      return false;  // CreateStep says why
    }
  }

  std::unique_ptr<Step> CreateStep(const Graph& graph, std::span<const Node* const> nodes,
                                   std::span<const uint8_t> packed) override {
    const auto create = [&] {
      if (nodes.size() == 2) {
        if (nodes[0]->op == "LowBitQuantize") return CreateQuantized(graph, *nodes[0], *nodes[1], packed);
        return nodes[1]->op == "LowBitDequantize" ? CreateDequantized(graph, *nodes[0], *nodes[1], packed)
                                                  : CreateResidualPair(graph, *nodes[0], *nodes[1], packed);
      }
      if (nodes.size() == 3) return CreatePooled(graph, *nodes[0], *nodes[1], *nodes[2], packed);
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

  std::unique_ptr<Step> CreateCopy() override {
    return std::make_unique<CudaStep>(cuda::PackCopy(device_->Properties()),
                                      [](std::span<const TensorShape> fed) { return fed[0]; });
  }

  std::shared_ptr<const StepPlan> PlanTogether(const Step& first, std::span<const TensorShape> first_fed,
                                               const Step& second,
                                               std::span<const TensorShape> second_fed) override {
    return tuner_->PlanTogether(static_cast<const CudaStep&>(first), first_fed,
                                static_cast<const CudaStep&>(second), second_fed);
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
    auto block = std::make_shared<DeviceBlock>(device_, bytes);
    const DeviceScope scope(device_->Ordinal());
    const cudaStream_t stream = device_->CopyStream();
    CheckCuda(cudaMemcpyAsync(block->Get(), tensor.data, bytes, cudaMemcpyHostToDevice, stream),
              "copying a constant");
    CheckCuda(cudaStreamSynchronize(stream), "copying a constant");
    return {block, block->Get()};
  }

  std::unique_ptr<Instance> CreateInstance(const RegionPlan& plan) override {
    return std::make_unique<GraphInstance>(plan, device_, use_graph_);
  }

  void Tune(RegionPlan& plan) override { tuner_->TuneTogether(plan); }
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
  bool FusesPair(const Graph& graph, const Node& first, const Node& second) const {
    const bool is_residual = second.inputs[0] != first.outputs[0];
    if (is_residual ? !IsConv(first) || !IsConv(second)
                    : first.op != "LowBitQuantize" && second.op != "LowBitDequantize") {
      return false;
    }
    const NodeSpec a = Decode(graph, first, Weights::kMayBeMissing),
                   b = Decode(graph, second, Weights::kMayBeMissing);
    if (is_residual) return FusesResidual(std::get_if<MatmulNode>(&a), std::get_if<MatmulNode>(&b));
    const auto* const quantize = std::get_if<QuantizeNode>(&a);
    const auto* const conv = std::get_if<MatmulNode>(&b);
    if (quantize != nullptr && conv != nullptr)
      return cuda::FusesQuantize(*quantize, *conv, device_->Properties());
    const auto* const matmul = std::get_if<MatmulNode>(&a);
    const auto* const dequantize = std::get_if<DequantizeNode>(&b);
    return matmul != nullptr && dequantize != nullptr && cuda::FusesDequantize(*matmul, *dequantize);
  }

  bool FusesPool(const Graph& graph, const Node& first, const Node& second, const Node& third) const {
    if (first.op != "LowBitQuantize" || third.op != "LowBitMaxPool") return false;
    const NodeSpec a = Decode(graph, first), b = Decode(graph, second, Weights::kMayBeMissing),
                   c = Decode(graph, third);
    const auto* const conv = std::get_if<MatmulNode>(&b);
    return conv != nullptr &&
           cuda::FusesPool(std::get<QuantizeNode>(a), *conv, std::get<MaxPoolNode>(c), device_->Properties());
  }

  bool FusesResidual(const MatmulNode* first, const MatmulNode* second) const {
    return first != nullptr && second != nullptr &&
           cuda::FusesResidual(*first, *second, device_->Properties());
  }

  std::unique_ptr<Step> CreateLowBit(const Graph& graph, const Node& node, std::span<const uint8_t> packed) {
    NodeSpec spec = Decode(graph, node, NeededBeside(packed));
    // Partitioning refuses such nodes, but a compiled model may hold what no partitioning has seen.
    if (const std::optional<std::string> reason = WithoutKernel(spec)) Fail(*reason);
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
    auto packed_node = cuda::PackStandard(spec, device_->Properties());
    DropWeights(spec);
    return std::make_unique<CudaStep>(
        std::move(packed_node),
        [spec = std::move(spec)](std::span<const TensorShape> fed) { return OutputOf(spec, fed); });
  }

  std::unique_ptr<Step> CreateDequantized(const Graph& graph, const Node& first, const Node& second,
                                          std::span<const uint8_t> packed) {
    NodeSpec product = Decode(graph, first, NeededBeside(packed)), dequantize = Decode(graph, second);
    const auto& matmul = std::get<MatmulNode>(product);
    auto packed_node =
        cuda::PackDequantizedMatmul(matmul, std::get<DequantizeNode>(dequantize), device_->Properties(),
                                    tuner_->ChooserFor(matmul.conv, true), packed);
    DropWeights(product);
    return std::make_unique<CudaStep>(
        std::move(packed_node),
        [product = std::move(product), dequantize = std::move(dequantize)](std::span<const TensorShape> fed) {
          const TensorShape codes = OutputOf(product, fed);
          return OutputOf(dequantize, std::span(&codes, 1));
        });
  }

  std::unique_ptr<cuda::PackedNode> PackQuantized(const QuantizeNode& quantize, const MatmulNode& matmul,
                                                  std::span<const uint8_t> packed) {
    const cuda::Device& device = device_->Properties();
    if (auto fused = cuda::PackQuantizedConv(quantize, matmul, device, {}, packed)) return fused;
    return std::make_unique<PackedSequence>(
        cuda::PackNode(quantize, device),
        cuda::PackMatmul(matmul, device, tuner_->ChooserFor(matmul.conv), packed),
        [quantize](const TensorShape& x) { return OutputOf(NodeSpec(quantize), std::span(&x, 1)); });
  }

  std::unique_ptr<Step> CreateQuantized(const Graph& graph, const Node& first, const Node& second,
                                        std::span<const uint8_t> packed) {
    NodeSpec quantize = Decode(graph, first), conv = Decode(graph, second, NeededBeside(packed));
    auto packed_node = PackQuantized(std::get<QuantizeNode>(quantize), std::get<MatmulNode>(conv), packed);
    DropWeights(conv);
    return std::make_unique<CudaStep>(
        std::move(packed_node),
        [quantize = std::move(quantize), conv = std::move(conv)](std::span<const TensorShape> fed) {
          return OutputOfSequence(quantize, conv, fed);
        });
  }

  std::unique_ptr<Step> CreatePooled(const Graph& graph, const Node& first, const Node& second,
                                     const Node& third, std::span<const uint8_t> packed) {
    NodeSpec quantize = Decode(graph, first), conv = Decode(graph, second, NeededBeside(packed)),
             pool = Decode(graph, third);
    const auto& grid = std::get<QuantizeNode>(quantize);
    const auto& matmul = std::get<MatmulNode>(conv);
    const auto& window = std::get<MaxPoolNode>(pool);
    const cuda::Device& device = device_->Properties();
    auto packed_node = cuda::PackPooledConv(grid, matmul, window, device, packed);
    std::unique_ptr<cuda::PackedNode> apart;
    if (packed_node == nullptr) apart = PackQuantized(grid, matmul, packed);
    DropWeights(conv);
    const auto convolved = [quantize = std::move(quantize),
                            conv = std::move(conv)](std::span<const TensorShape> fed) {
      return OutputOfSequence(quantize, conv, fed);
    };
    if (packed_node == nullptr) {
      packed_node = std::make_unique<PackedSequence>(
          std::move(apart), cuda::PackNode(pool, device),
          [convolved](const TensorShape& x) { return convolved(std::span(&x, 1)); });
    }
    return std::make_unique<CudaStep>(std::move(packed_node),
                                      [convolved, pool = std::move(pool)](std::span<const TensorShape> fed) {
                                        const TensorShape codes = convolved(fed);
                                        return OutputOf(pool, std::span(&codes, 1));
                                      });
  }

  std::unique_ptr<Step> CreateResidualPair(const Graph& graph, const Node& first, const Node& second,
                                           std::span<const uint8_t> packed) {
    NodeSpec a = Decode(graph, first, NeededBeside(packed)), b = Decode(graph, second, NeededBeside(packed));
    const auto &a_matmul = std::get<MatmulNode>(a), &b_matmul = std::get<MatmulNode>(b);
    auto packed_node = cuda::PackResidualPair(a_matmul, b_matmul, device_->Properties(),
                                              tuner_->ChoosersFor(a_matmul.conv, b_matmul.conv), packed);
    std::string key =
        DescribeForTuning(a_matmul.conv, "", false) + ", " + DescribeForTuning(b_matmul.conv, "", false);
    DropWeights(a);
    DropWeights(b);
    return std::make_unique<CudaStep>(
        std::move(packed_node),
        [a = std::move(a), b = std::move(b)](std::span<const TensorShape> fed) {
          return OutputOfResidualPair(a, b, fed);
        },
        std::move(key));
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
  const bool use_graph_, reference_;
  const std::shared_ptr<Tuner> tuner_;
};

}  // namespace

std::shared_ptr<Backend> CreateCudaBackend(std::shared_ptr<CudaDevice> device, const EpOptions& options) {
  return std::make_shared<CudaBackend>(std::move(device), options);
}

}  // namespace lowbit::ep
