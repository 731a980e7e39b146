#include "ep/cuda/fusions.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/node_reader.h"
#include "core/status.h"
#include "ep/cuda/packed_sequence.h"
#include "kernels/cuda/left_out.h"

namespace lowbit::ep {
namespace {

const MatmulNode& ProductOf(const NodeSpec& spec) { return std::get<MatmulNode>(spec); }

bool Is(Part part, std::string_view op) {
  switch (part) {
    case Part::kQuantize:
      return op == "LowBitQuantize";
    case Part::kConv:
      return op == "LowBitConv" || op == "APConv";
    case Part::kGemm:
      return op == "LowBitGemm" || op == "APGemm";
    case Part::kMaxPool:
      return op == "LowBitMaxPool";
    case Part::kAdd:
      return op == "LowBitAdd";
    case Part::kBinary:
      return op == "LowBitAdd" || op == "LowBitMul";
    case Part::kLookup:
      return op == "LowBitLookup" || op == "LowBitRequantize";
    case Part::kAffine:
      return op == "LowBitAffine";
    case Part::kDequantize:
      return op == "LowBitDequantize";
  }
  return false;
}

size_t FedCount(const NodeSpec& spec) {
  const auto* const product = std::get_if<MatmulNode>(&spec);
  return std::holds_alternative<BinaryNode>(spec) ||
                 (product != nullptr && product->conv.epilogue.has_residual)
             ? 2
             : 1;
}

// Shapes need only the geometry.
NodeSpec WithoutWeights(MatmulNode product) {
  std::vector<uint8_t>().swap(product.conv.weights);
  return product;
}

// ---- residual pair

bool FitsResidualPair(Specs specs, const cuda::Device& device) {
  return cuda::FusesResidual(ProductOf(specs[0]), ProductOf(specs[1]), device);
}

std::unique_ptr<cuda::PackedNode> PackResidualPair(Specs specs, const cuda::Device& device, Tuner& tuner,
                                                   std::span<const uint8_t> packed) {
  const MatmulNode &first = ProductOf(specs[0]), &second = ProductOf(specs[1]);
  return cuda::PackResidualPair(first, second, device, tuner.ChoosersFor(first.conv, second.conv), packed);
}

// ---- a function of each channel's codes + convolution

bool FitsAffine(Specs specs, const cuda::Device& device) {
  return cuda::FusesAffine(std::get<AffineNode>(specs[0]), ProductOf(specs[1]), device);
}

std::unique_ptr<cuda::PackedNode> PackAffine(Specs specs, const cuda::Device& device, Tuner& tuner,
                                             std::span<const uint8_t> packed) {
  const MatmulNode& conv = ProductOf(specs[1]);
  return cuda::PackAffineConv(std::get<AffineNode>(specs[0]), conv, device,
                              {tuner.ChooserFor(conv.conv, "affine"), tuner.ChooserFor(conv.conv)}, packed);
}

// ---- two convolutions + the addition of their codes

template <bool kLastFirst>
bool FitsAddedPair(Specs specs, const cuda::Device& device) {
  const auto second = cuda::WithResidual(ProductOf(specs[1]), std::get<BinaryNode>(specs[2]), kLastFirst);
  return second && cuda::FusesResidual(ProductOf(specs[0]), *second, device);
}

template <bool kLastFirst>
std::unique_ptr<cuda::PackedNode> PackAddedPair(Specs specs, const cuda::Device& device, Tuner& tuner,
                                                std::span<const uint8_t> packed) {
  const MatmulNode& first = ProductOf(specs[0]);
  const auto second = cuda::WithResidual(ProductOf(specs[1]), std::get<BinaryNode>(specs[2]), kLastFirst);
  Require(second.has_value(), "a convolution and an addition that do not fit each other");
  return cuda::PackResidualPair(first, *second, device, tuner.ChoosersFor(first.conv, second->conv), packed);
}

// ---- convolution + addition or multiplication

// To the tuner.
constexpr const char* kMappedSumKey = "mapped sum";

template <bool kConvFirst>
bool FitsAdded(Specs specs, const cuda::Device&) {
  const MatmulNode& conv = ProductOf(specs[0]);
  const auto& add = std::get<BinaryNode>(specs[1]);
  return cuda::WithResidual(conv, add, kConvFirst) || cuda::FusesTableSum(conv, nullptr, add, kConvFirst);
}

template <bool kConvFirst>
std::unique_ptr<cuda::PackedNode> PackAdded(Specs specs, const cuda::Device& device, Tuner& tuner,
                                            std::span<const uint8_t> packed) {
  const MatmulNode& conv = ProductOf(specs[0]);
  const auto& add = std::get<BinaryNode>(specs[1]);
  const auto both = cuda::WithResidual(conv, add, kConvFirst);
  if (!both) {
    Require(cuda::FusesTableSum(conv, nullptr, add, kConvFirst),
            "a convolution and an addition that do not fit each other");
    return cuda::PackTableSum(conv, nullptr, add, kConvFirst, device,
                              tuner.ChooserFor(conv.conv, kMappedSumKey), packed);
  }
  return cuda::PackConvAdd(*both, add, kConvFirst, device, tuner.ChooserFor(both->conv), packed);
}

// ---- product + table

// To the tuner.
constexpr const char* kMappedKey = "mapped";

bool FitsMapped(Specs specs, const cuda::Device&) {
  return cuda::FusesLookup(ProductOf(specs[0]), std::get<LookupNode>(specs[1]));
}

std::unique_ptr<cuda::PackedNode> PackMapped(Specs specs, const cuda::Device& device, Tuner& tuner,
                                             std::span<const uint8_t> packed) {
  const MatmulNode& product = ProductOf(specs[0]);
  return cuda::PackMappedMatmul(product, std::get<LookupNode>(specs[1]), device,
                                tuner.ChooserFor(product.conv, kMappedKey), packed);
}

// ---- convolution + table + addition or multiplication

template <bool kTableFirst>
bool FitsMappedSum(Specs specs, const cuda::Device&) {
  return cuda::FusesTableSum(ProductOf(specs[0]), &std::get<LookupNode>(specs[1]),
                             std::get<BinaryNode>(specs[2]), kTableFirst);
}

template <bool kTableFirst>
std::unique_ptr<cuda::PackedNode> PackMappedSum(Specs specs, const cuda::Device& device, Tuner& tuner,
                                                std::span<const uint8_t> packed) {
  const MatmulNode& conv = ProductOf(specs[0]);
  return cuda::PackTableSum(conv, &std::get<LookupNode>(specs[1]), std::get<BinaryNode>(specs[2]),
                            kTableFirst, device, tuner.ChooserFor(conv.conv, kMappedSumKey), packed);
}

// ---- table + addition

template <bool kTableFirst>
bool FitsMappedAdd(Specs specs, const cuda::Device&) {
  return cuda::FusesMapped(std::get<LookupNode>(specs[0]), std::get<BinaryNode>(specs[1]), kTableFirst);
}

template <bool kTableFirst>
std::unique_ptr<cuda::PackedNode> PackMappedAdd(Specs specs, const cuda::Device& device, Tuner&,
                                                std::span<const uint8_t>) {
  return cuda::PackMapped(std::get<LookupNode>(specs[0]), std::get<BinaryNode>(specs[1]), kTableFirst,
                          device);
}

// ---- quantize + convolution

bool FitsQuantized(Specs specs, const cuda::Device& device) {
  return cuda::FusesQuantize(std::get<QuantizeNode>(specs[0]), ProductOf(specs[1]), device);
}

// With a table behind both where there is one more node.
std::unique_ptr<cuda::PackedNode> PackQuantized(Specs specs, const cuda::Device& device, Tuner& tuner,
                                                std::span<const uint8_t> packed) {
  const auto& quantize = std::get<QuantizeNode>(specs[0]);
  const MatmulNode& conv = ProductOf(specs[1]);
  const auto* const lookup = specs.size() > 2 ? &std::get<LookupNode>(specs[2]) : nullptr;
  if (auto fused = cuda::PackQuantizedConv(quantize, conv, lookup, device, packed)) return fused;
  return std::make_unique<PackedSequence>(
      cuda::PackNode(specs[0], device),
      lookup != nullptr ? PackMapped(specs.subspan(1), device, tuner, packed)
                        : cuda::PackMatmul(conv, device, tuner.ChooserFor(conv.conv), packed),
      [first = specs[0]](const TensorShape& x) { return OutputOf(first, std::span(&x, 1)); });
}

bool FitsQuantizedMapped(Specs specs, const cuda::Device& device) {
  return FitsQuantized(specs, device) && FitsMapped(specs.subspan(1), device);
}

// ---- quantize + convolution + max pooling

bool FitsPooled(Specs specs, const cuda::Device& device) {
  return cuda::FusesPool(std::get<QuantizeNode>(specs[0]), ProductOf(specs[1]),
                         std::get<MaxPoolNode>(specs[2]), device);
}

std::unique_ptr<cuda::PackedNode> PackPooled(Specs specs, const cuda::Device& device, Tuner& tuner,
                                             std::span<const uint8_t> packed) {
  const auto& quantize = std::get<QuantizeNode>(specs[0]);
  const MatmulNode& conv = ProductOf(specs[1]);
  if (auto fused = cuda::PackPooledConv(quantize, conv, std::get<MaxPoolNode>(specs[2]), device, packed))
    return fused;
  auto convolved = [quantize = specs[0], geometry = WithoutWeights(conv)](const TensorShape& x) {
    const TensorShape codes = OutputOf(quantize, std::span(&x, 1));
    return OutputOf(geometry, std::span(&codes, 1));
  };
  return std::make_unique<PackedSequence>(PackQuantized(specs.first(2), device, tuner, packed),
                                          cuda::PackNode(specs[2], device), std::move(convolved));
}

// ---- product + dequantize

bool FitsDequantized(Specs specs, const cuda::Device&) {
  return cuda::FusesDequantize(ProductOf(specs[0]), std::get<DequantizeNode>(specs[1]));
}

std::unique_ptr<cuda::PackedNode> PackDequantized(Specs specs, const cuda::Device& device, Tuner& tuner,
                                                  std::span<const uint8_t> packed) {
  const MatmulNode& product = ProductOf(specs[0]);
  return cuda::PackDequantizedMatmul(product, std::get<DequantizeNode>(specs[1]), device,
                                     tuner.ChooserFor(product.conv, "dequantized"), packed);
}

constexpr PatternNode kResidualPair[] = {{Part::kConv}, {Part::kConv, Reads::kResidual}};
constexpr PatternNode kAffine[] = {{Part::kAffine}, {Part::kConv}};
constexpr PatternNode kAdded[] = {{Part::kConv}, {Part::kBinary}};
constexpr PatternNode kAddedSecond[] = {{Part::kConv}, {Part::kBinary, Reads::kResidual}};
constexpr PatternNode kAddedPair[] = {{Part::kConv}, {Part::kConv, Reads::kNothing}, {Part::kAdd}};
constexpr PatternNode kAddedPairSecond[] = {
    {Part::kConv}, {Part::kConv, Reads::kNothing}, {Part::kAdd, Reads::kResidual}};
constexpr PatternNode kQuantized[] = {{Part::kQuantize}, {Part::kConv}};
constexpr PatternNode kMapped[] = {{Part::kConv}, {Part::kLookup}};
constexpr PatternNode kMappedGemm[] = {{Part::kGemm}, {Part::kLookup}};
constexpr PatternNode kMappedSum[] = {{Part::kConv}, {Part::kLookup}, {Part::kBinary}};
constexpr PatternNode kMappedSumSecond[] = {
    {Part::kConv}, {Part::kLookup}, {Part::kBinary, Reads::kResidual}};
constexpr PatternNode kMappedAdd[] = {{Part::kLookup}, {Part::kAdd}};
constexpr PatternNode kMappedAddSecond[] = {{Part::kLookup}, {Part::kAdd, Reads::kResidual}};
constexpr PatternNode kQuantizedMapped[] = {{Part::kQuantize}, {Part::kConv}, {Part::kLookup}};
constexpr PatternNode kPooled[] = {{Part::kQuantize}, {Part::kConv}, {Part::kMaxPool}};
constexpr PatternNode kDequantized[] = {{Part::kGemm}, {Part::kDequantize}};

// Steps grow by a node at a time: the first nodes of a longer pattern are one of their own.
constexpr Fusion kFusions[] = {
    {"residual_pair", "a shortcut's convolution and the one that adds its codes", kResidualPair,
     FitsResidualPair, PackResidualPair},
    {"affine_conv", "a normalization that no weights take in, and the convolution that alone reads it",
     kAffine, FitsAffine, PackAffine},
    {"added", "a convolution and the addition of its codes, or their product", kAdded, FitsAdded<true>,
     PackAdded<true>},
    {"added_second", "the same, its codes the second operand", kAddedSecond, FitsAdded<false>,
     PackAdded<false>},
    {"added_pair", "two convolutions and the addition of their codes", kAddedPair, FitsAddedPair<true>,
     PackAddedPair<true>},
    {"added_pair_second", "the same, the later one's codes the second operand", kAddedPairSecond,
     FitsAddedPair<false>, PackAddedPair<false>},
    {"mapped", "a convolution and the table of its codes, as an activation is", kMapped, FitsMapped,
     PackMapped},
    {"mapped_product", "a matrix product and the table of its codes", kMappedGemm, FitsMapped, PackMapped},
    {"mapped_sum", "a convolution, the table of its codes and the addition of what that has, or its product",
     kMappedSum, FitsMappedSum<true>, PackMappedSum<true>},
    {"mapped_sum_second", "the same, the table's codes the second operand", kMappedSumSecond,
     FitsMappedSum<false>, PackMappedSum<false>},
    {"mapped_add", "a table of codes and the addition of what that has", kMappedAdd, FitsMappedAdd<true>,
     PackMappedAdd<true>},
    {"mapped_add_second", "the same, the table's codes the second operand", kMappedAddSecond,
     FitsMappedAdd<false>, PackMappedAdd<false>},
    {"quantized_conv", "a network's first layer from float pixels", kQuantized, FitsQuantized, PackQuantized},
    {"quantized_mapped", "the same and the table of its codes", kQuantizedMapped, FitsQuantizedMapped,
     PackQuantized},
    {"pooled_stem", "the same and the max pooling behind it", kPooled, FitsPooled, PackPooled},
    {"dequantized_product", "a network's last layer to float32", kDequantized, FitsDequantized,
     PackDequantized},
};

}  // namespace

void RequireKnownKernels() {
  std::vector<const char*> names = {kPaddedChannels, kStoredChannels, kFloatSum,    kPlanes,
                                    kJoinedConv,     kBottleneck,     kChannelsLast};
  for (const Fusion& fusion : kFusions) names.push_back(fusion.name);
  cuda::RequireKnownNames(cuda::LeftOutHere(), names);
}

const Fusion* FindFusion(std::span<const FusedNode> nodes) {
  const auto found = std::find_if(std::begin(kFusions), std::end(kFusions), [&](const Fusion& fusion) {
    return std::equal(nodes.begin(), nodes.end(), fusion.nodes.begin(), fusion.nodes.end(),
                      [](const FusedNode& node, const PatternNode& pattern) {
                        return Is(pattern.part, node.op) && node.reads == pattern.reads;
                      });
  });
  const bool is_there = found != std::end(kFusions) && !cuda::IsLeftOut(found->name);
  return is_there ? &*found : nullptr;
}

// A node that reads anything of those before it reads all that none has read yet.
TensorShape OutputOfFused(Specs specs, const Fusion& fusion, std::span<const TensorShape> fed) {
  std::vector<TensorShape> made;
  for (size_t i = 0; i < specs.size(); ++i) {
    const bool reads = i > 0 && fusion.nodes[i].reads != Reads::kNothing;
    const size_t count = FedCount(specs[i]) - (reads ? made.size() : 0);
    Require(count <= fed.size(), fusion.name, " was fed too few tensors");
    std::vector<TensorShape> own(fed.begin(), fed.begin() + static_cast<std::ptrdiff_t>(count));
    fed = fed.subspan(count);
    if (reads) {
      if (fusion.nodes[i].reads == Reads::kInput) std::reverse(made.begin(), made.end());
      own.insert(fusion.nodes[i].reads == Reads::kInput ? own.begin() : own.end(), made.begin(), made.end());
      made.clear();
    }
    made.push_back(OutputOf(specs[i], own));
  }
  return made.back();
}

}  // namespace lowbit::ep
