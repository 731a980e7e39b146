// Matrix products of the node family as nodes: dims to images, packed constants, a plan per shape.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>

#include "core/epilogue.h"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/fused/affine_conv.h"
#include "kernels/cuda/fused/bit_blocks.h"
#include "kernels/cuda/fused/bit_pair.h"
#include "kernels/cuda/fused/chain.h"
#include "kernels/cuda/fused/quantized_conv.h"
#include "kernels/cuda/fused/residual_pair.h"
#include "kernels/cuda/fused/stem_pool.h"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

ConvShape ImagesOf(const ConvGeometry& geometry, const MatmulLayout& layout,
                   const std::vector<int64_t>& dims) {
  const int64_t rank = static_cast<int64_t>(dims.size());
  if (!layout.is_gemm) {
    Require(layout.spatial < 3, "3-D convolutions have no kernel for GPUs yet");
    Require(rank == layout.spatial + 2 && dims.back() == geometry.in_channels, "x has rank ", rank, " and ",
            dims.empty() ? 0 : dims.back(), " channels last, expected rank ", layout.spatial + 2, " and ",
            geometry.in_channels, " channels");
    return InferConvShape(geometry, dims[0], layout.spatial == 1 ? 1 : dims[1],
                          dims[static_cast<size_t>(rank) - 2]);
  }
  const int64_t axis = layout.axis < 0 ? layout.axis + rank : layout.axis;
  Require(axis >= 0 && axis < rank, "attribute 'axis' is ", layout.axis, ", x has rank ", rank);
  const std::span<const int64_t> all = dims;
  const int64_t k = ElementCount(all.subspan(static_cast<size_t>(axis)));
  Require(k == geometry.in_channels, "the dims of x from ", axis, " on hold ", k, " features, expected ",
          geometry.in_channels);
  return InferConvShape(geometry, ElementCount(all.first(static_cast<size_t>(axis))), 1, 1);
}

// The tensors of places are fed behind what is read.
NodePlanPtr PlanOf(const std::shared_ptr<const ConvPlan>& plan, bool has_residual, size_t places = 0) {
  const auto launch = [plan, has_residual, places](const Run& run) {
    const size_t expected = (has_residual ? 2 : 1) + places;
    Require(run.fed.size() == expected, "a convolution was fed ", run.fed.size(), " tensors, expected ",
            expected);
    std::array<void*, kMostPlaces> stored = {};
    for (size_t i = 0; i < places; ++i) stored[i] = const_cast<void*>(run.fed[expected - places + i]);
    LaunchConv(*plan, run.fed[0], has_residual ? run.fed[1] : nullptr, run.y, run.workspace, run.queue,
               std::span(stored).first(places));
  };
  return MakePlan(PlanConfig(*plan).Text(), launch, PlanWorkspaceBytes(*plan));
}

// What a choice of kernels depends on.
std::string PlanesText(const TensorPlanes& planes) {
  if (planes == TensorPlanes{}) return "";
  std::string text = " planes ";
  text.append(std::to_string(planes.x));
  if (planes.added > 0) text.append("+").append(std::to_string(planes.added));
  return text.append(">").append(std::to_string(planes.y));
}

class PackedMatmul final : public PackedNode {
 public:
  PackedMatmul(const MatmulNode& node, const Device& device, ConvChooser choose,
               std::span<const uint8_t> packed, const StoredAs& stored = {})
      : geometry_(node.conv.geometry),
        layout_(node.layout),
        has_residual_(node.conv.epilogue.has_residual || stored.added || stored.float_sum),
        is_link_(!stored.added && !stored.float_sum),
        choose_(std::move(choose)),
        conv_(PackConv(node.conv, device, packed, stored)) {}

  ConvShape ShapeOf(const TensorShape& x) const { return ImagesOf(geometry_, layout_, x.dims); }
  const std::shared_ptr<const PackedConv>& Conv() const { return conv_; }

  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    Require(!fed.empty(), "a convolution was fed no tensor");
    const ConvShape shape = ShapeOf(fed[0]);
    const auto plan = [&](const std::optional<ConvConfig>& config) {
      ConvPlaces places = stored_.Where();
      places.makes_halves = halves_.y;
      places.adds_halves = halves_.Has(1);
      return Hold(PlanOf(PlanConv(conv_, shape, config, places, planes_), has_residual_, stored_.Count()),
                  stored_.Tables());
    };
    // Nothing to compute, nothing to choose.
    if (!choose_ || shape.OutPixels() == 0) return plan(std::nullopt);
    return plan(choose_({ShapeText(shape) + stored_.Text() + PlanesText(planes_) + HalvesText(),
                         CandidateConfigs(*conv_, shape, stored_.Count() > 0, planes_),
                         plan,
                         {fed.begin(), fed.end()},
                         y}));
  }
  bool MayStore(Shapes, std::span<const ChannelMove> moves) const override {
    const EpilogueParams& e = conv_->EpilogueOf();
    if (!e.quantized_output) return StoredChannels::FitFloats(moves);
    return !e.dequantizes && conv_->Geometry().out_channels % 16 == 0 && StoredChannels::Fit(moves);
  }
  PackedNodePtr Storing(std::span<const ChannelMove> moves, bool keeps_output) const override {
    auto storing = std::make_unique<PackedMatmul>(*this);
    storing->stored_ = StoredChannels(moves, keeps_output, conv_->On());
    return storing;
  }
  int PlanesRead() const override { return cuda::PlanesRead(*conv_); }
  bool AddsPlanes(int planes) const override { return is_link_ && conv_->MayAddPlanes(planes); }
  std::optional<double> Microseconds(Shapes fed, const TensorPlanes& planes) const override {
    const ConvShape shape = ShapeOf(fed[0]);
    // What a product flattens are no channels of one pixel.
    const bool flattens = planes.x > 0 && fed[0].dims.back() != geometry_.in_channels;
    if (shape.OutPixels() == 0 || flattens) return std::nullopt;
    return EstimateMicroseconds(*conv_, shape, planes);
  }
  PackedNodePtr InPlanes(const TensorPlanes& planes) const override {
    auto in_planes = std::make_unique<PackedMatmul>(*this);
    in_planes->planes_ = planes;
    return in_planes;
  }
  bool KeepsOrder() const override { return true; }
  bool MayMakeChannelsLast(Shapes) const override { return !conv_->EpilogueOf().quantized_output; }
  bool MayReadChannelsLast(Shapes, size_t i) const override {
    return i == 1 && conv_->EpilogueOf().adds_floats;
  }
  PackedNodePtr InChannelsLast(const ChannelsLast& halves) const override {
    auto in_halves = std::make_unique<PackedMatmul>(*this);
    in_halves->halves_ = halves;
    return in_halves;
  }
  std::optional<ChainLink> Link(Shapes fed) const override {
    if (fed.empty() || !is_link_) return std::nullopt;
    return ChainLink{conv_, ShapeOf(fed[0]), nullptr, {}, planes_};
  }
  // A tile's residuals are read by the block that stores its codes, before it does.
  std::optional<size_t> Overwrites() const override {
    return has_residual_ ? std::optional<size_t>(1) : std::nullopt;
  }
  std::vector<uint8_t> Packed() const override { return SavePacked(*conv_); }

 private:
  std::string HalvesText() const {
    return std::string(halves_.Has(1) ? " adds float16" : "") + (halves_.y ? " to float16" : "");
  }

  ConvGeometry geometry_;
  MatmulLayout layout_;
  bool has_residual_, is_link_;
  ConvChooser choose_;
  std::shared_ptr<const PackedConv> conv_;
  StoredChannels stored_;
  TensorPlanes planes_;
  ChannelsLast halves_;  // float tensors that lie as float16
};

class PackedConvAdd final : public PackedNode {
 public:
  PackedConvAdd(const MatmulNode& node, const BinaryNode& add, bool conv_first, const Device& device,
                ConvChooser choose, std::span<const uint8_t> packed, const StoredAs& stored = {})
      : fused_(node, device, std::move(choose), packed, stored),
        made_type_((conv_first ? add.spec.a_signed : add.spec.b_signed) ? ElementType::kInt8
                                                                        : ElementType::kUInt8),
        other_first_(add) {
    if (conv_first) {
      std::swap(other_first_.spec.a_signed, other_first_.spec.b_signed);
      std::swap(other_first_.spec.a_zero_point, other_first_.spec.b_zero_point);
      std::swap(other_first_.spec.a_scale, other_first_.spec.b_scale);
    }
    add_ = PackNode(other_first_, device);
  }

  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    Require(fed.size() == 2, "a convolution and an addition were fed ", fed.size(), " tensors, expected 2");
    const TensorShape made = MadeOf(fed);
    if (made.dims == fed[1].dims) return fused_.Plan(fed, y);
    if (auto gated = PlanGated(fused_.Conv(), fused_.ShapeOf(fed[0]), other_first_.spec, fed[1]))
      return gated;
    const TensorShape add_fed[] = {fed[1], made};
    return PlanInTurn(PlanOf(PlanWithoutResidual(fused_.Conv(), fused_.ShapeOf(fed[0])), false),
                      add_->Plan(add_fed, y), ElementCount(made.dims));
  }
  std::optional<size_t> Overwrites() const override { return fused_.Overwrites(); }
  std::optional<ChainLink> Link(Shapes fed) const override {
    if (fed.size() < 2 || MadeOf(fed).dims != fed[1].dims) return std::nullopt;
    return fused_.Link(fed);
  }
  int PlanesRead() const override { return fused_.PlanesRead(); }
  bool AddsPlanes(int planes) const override { return fused_.AddsPlanes(planes); }
  std::optional<double> Microseconds(Shapes fed, const TensorPlanes& planes) const override {
    if (fed.size() < 2 || MadeOf(fed).dims != fed[1].dims) return std::nullopt;
    return fused_.Microseconds(fed, planes);
  }
  PackedNodePtr InPlanes(const TensorPlanes& planes) const override { return fused_.InPlanes(planes); }
  bool MayStore(Shapes fed, std::span<const ChannelMove> moves) const override {
    return fed.size() == 2 && MadeOf(fed).dims == fed[1].dims && fused_.MayStore(fed, moves);
  }
  PackedNodePtr Storing(std::span<const ChannelMove> moves, bool keeps_output) const override {
    return fused_.Storing(moves, keeps_output);
  }
  std::vector<uint8_t> Packed() const override { return fused_.Packed(); }

 private:
  TensorShape MadeOf(Shapes fed) const {
    const ConvShape shape = fused_.ShapeOf(fed[0]);
    TensorShape made{made_type_, fed[0].dims};
    const size_t rank = made.dims.size();
    if (rank == 4) made.dims[1] = shape.out_h;
    made.dims[rank - 2] = shape.out_w;
    made.dims[rank - 1] = fused_.Conv()->Geometry().out_channels;
    return made;
  }

  PackedMatmul fused_;
  ElementType made_type_;
  BinaryNode other_first_;  // what the convolution makes, second
  PackedNodePtr add_;
};

// Shapes need only the geometry.
NodeSpec WithoutWeights(MatmulNode node) {
  std::vector<uint8_t>().swap(node.conv.weights);
  return node;
}

// A product, the addition of its float results and another tensor, and what cuts off the sums.
class PackedFloatSum final : public PackedNode {
 public:
  PackedFloatSum(const MatmulNode& product, const std::optional<UnaryOp>& activation, const Device& device,
                 ConvChooser choose, std::span<const uint8_t> packed)
      : product_(WithoutWeights(product)),
        limits_(activation ? LimitsOf(StandardNode(*activation)) : Limits{}),
        fused_(product, device, std::move(choose), packed,
               StoredAs{{}, {}, {}, FloatLimits{limits_.low, limits_.high}}) {}

  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    Require(fed.size() == 2, "a product and an addition were fed ", fed.size(), " tensors, expected 2");
    const TensorShape made = OutputOf(product_, fed.first(1));
    if (made.dims == fed[1].dims) return fused_.Plan(fed, y);
    const TensorShape terms[] = {fed[1], made};
    return PlanInTurn(PlanOf(PlanWithoutResidual(fused_.Conv(), fused_.ShapeOf(fed[0])), false),
                      PlanAdd(terms, y, limits_, fused_.Conv()->On()), BytesOfFloats(made));
  }
  std::optional<size_t> Overwrites() const override { return fused_.Overwrites(); }
  bool MayStore(Shapes fed, std::span<const ChannelMove> moves) const override {
    return IsOneKernel(fed) && fused_.MayStore(fed, moves);
  }
  PackedNodePtr Storing(std::span<const ChannelMove> moves, bool keeps_output) const override {
    return fused_.Storing(moves, keeps_output);
  }
  bool KeepsOrder() const override { return true; }
  bool MayMakeChannelsLast(Shapes fed) const override {
    return IsOneKernel(fed) && fused_.MayMakeChannelsLast(fed);
  }
  bool MayReadChannelsLast(Shapes fed, size_t i) const override {
    return IsOneKernel(fed) && fused_.MayReadChannelsLast(fed, i);
  }
  PackedNodePtr InChannelsLast(const ChannelsLast& halves) const override {
    return fused_.InChannelsLast(halves);
  }
  std::vector<uint8_t> Packed() const override { return fused_.Packed(); }

 private:
  bool IsOneKernel(Shapes fed) const {
    return fed.size() == 2 && OutputOf(product_, fed.first(1)).dims == fed[1].dims;
  }

  NodeSpec product_;  // shapes need only the geometry
  Limits limits_;
  PackedMatmul fused_;
};

// What two nodes packed: how many bytes the first one, those, the second's.
std::vector<uint8_t> Joined(const PackedMatmul& a, const PackedMatmul& b) {
  const std::vector<uint8_t> first = a.Packed(), second = b.Packed();
  const uint64_t first_bytes = first.size();
  std::vector<uint8_t> both(sizeof first_bytes + first.size() + second.size());
  std::memcpy(both.data(), &first_bytes, sizeof first_bytes);
  std::copy(second.begin(), second.end(),
            std::copy(first.begin(), first.end(), both.begin() + sizeof first_bytes));
  return both;
}
std::span<const uint8_t> Part(std::span<const uint8_t> packed, bool is_first) {
  if (packed.empty()) return {};
  uint64_t first_bytes = 0;
  Require(packed.size() > sizeof first_bytes, "the packed nodes have ", packed.size(), " bytes, too few");
  std::memcpy(&first_bytes, packed.data(), sizeof first_bytes);
  const std::span<const uint8_t> both = packed.subspan(sizeof first_bytes);
  Require(first_bytes > 0 && first_bytes < both.size(), "the packed nodes have ", both.size(),
          " bytes, the first of them ", first_bytes, "; compile the model again");
  const auto count = static_cast<size_t>(first_bytes);
  return is_first ? both.first(count) : both.subspan(count);
}

class PackedResidualPair final : public PackedNode {
 public:
  PackedResidualPair(const MatmulNode& first, const MatmulNode& second, const Device& device,
                     const ResidualPairChoosers& choosers, std::span<const uint8_t> packed)
      : choose_(choosers.both),
        first_(first, device, choosers.first, Part(packed, true)),
        second_(second, device, choosers.second, Part(packed, false)) {}

  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    Require(fed.size() == 2, "two convolutions in one were fed ", fed.size(), " tensors, expected 2");
    const ResidualPairShapes shapes{first_.ShapeOf(fed[0]), second_.ShapeOf(fed[1])};
    const ResidualPair pair{first_.Conv(), second_.Conv()};
    // The first node's output has the dims of the second's.
    const TensorShape second_fed[] = {fed[1], y};
    const auto plan = [&](const ConvConfig& config) {
      if (config.kernel == &kBitPairKernel) {
        return MakePlan(config.Text(), [fused = PlanBitPair(pair, shapes, config)](const Run& run) {
          LaunchBitPair(*fused, run.fed[0], run.fed[1], run.y, run.queue);
        });
      }
      if (config.kernel != &kResidualPairKernel) {
        const bool is_in_planes = planes_ != TensorPlanes{};
        const int between = is_in_planes ? PlanesBetween(pair, shapes, planes_) : 0;
        return PlanInTurn(first_.InPlanes({planes_.x, between})->Plan(fed.first(1), y),
                          second_.InPlanes({planes_.added, planes_.y, between})->Plan(second_fed, y),
                          ElementCount(y.dims));
      }
      return MakePlan(config.Text(), [fused = PlanResidualPair(pair, shapes, config)](const Run& run) {
        LaunchResidualPair(*fused, run.fed[0], run.fed[1], run.y, run.queue);
      });
    };
    const std::vector<ConvConfig> configs =
        planes_ == TensorPlanes{} ? ResidualPairConfigs(pair, shapes) : BitPairConfigs(pair, shapes, planes_);
    Require(!configs.empty(),
            "two convolutions have no kernels for their planes; let them read and store bytes");
    if (!choose_) return plan(configs.front());
    return plan(choose_({ShapeText(shapes.first) + "+" + ShapeText(shapes.second) + PlanesText(planes_),
                         configs,
                         plan,
                         {fed.begin(), fed.end()},
                         y}));
  }

  std::optional<ChainLink> Link(Shapes fed) const override {
    if (fed.size() < 2) return std::nullopt;
    return ChainLink{second_.Conv(), second_.ShapeOf(fed[1]), first_.Conv(), first_.ShapeOf(fed[0])};
  }
  std::vector<uint8_t> Packed() const override { return Joined(first_, second_); }

  int PlanesRead() const override { return first_.PlanesRead(); }
  // What the second reads.
  bool AddsPlanes(int planes) const override { return second_.PlanesRead() == planes; }
  std::optional<double> Microseconds(Shapes fed, const TensorPlanes& planes) const override {
    if (fed.size() < 2) return std::nullopt;
    const ResidualPairShapes shapes{first_.ShapeOf(fed[0]), second_.ShapeOf(fed[1])};
    if (shapes.second.OutPixels() == 0) return std::nullopt;
    const ResidualPair pair{first_.Conv(), second_.Conv()};
    return planes == TensorPlanes{} ? EstimateMicroseconds(pair, shapes)
                                    : EstimateMicroseconds(pair, shapes, planes);
  }
  PackedNodePtr InPlanes(const TensorPlanes& planes) const override {
    auto in_planes = std::make_unique<PackedResidualPair>(*this);
    in_planes->planes_ = planes;
    return in_planes;
  }

 private:
  ConvChooser choose_;
  PackedMatmul first_, second_;
  TensorPlanes planes_;  // added: of what the second is fed
};

class PackedAffineConv final : public PackedNode {
 public:
  PackedAffineConv(const AffineNode& affine, const MatmulNode& conv, const Device& device,
                   const AffineConvChoosers& choosers, std::span<const uint8_t> packed)
      : choose_(choosers.both),
        made_type_(affine.spec.quantizer.is_signed ? ElementType::kInt8 : ElementType::kUInt8),
        affine_node_(affine),
        device_(device),
        conv_(conv, device, choosers.conv, packed) {
    if (const std::optional<AffineLines> lines = AffineLinesOf(affine.spec))
      lines_ = PackLines(*lines, conv.conv.geometry.in_channels, device);
  }

  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    Require(fed.size() == 1, "a function and a convolution were fed ", fed.size(), " tensors, expected 1");
    const TensorShape made{made_type_, fed[0].dims};
    const auto plan_in_turn = [&] {
      return PlanInTurn(PackedAffine().Plan(fed, made), conv_.Plan(std::span(&made, 1), y),
                        ElementCount(made.dims));
    };
    if (lines_ == nullptr) return plan_in_turn();
    const AffineConv nodes = NodesAt(fed[0]);
    const auto plan = [&](const ConvConfig& config) {
      if (config.kernel != &kAffineConvKernel) return plan_in_turn();
      return MakePlan(config.Text(), [fused = PlanAffineConv(nodes, config)](const Run& run) {
        LaunchAffineConv(*fused, run.fed.first(1), nullptr, run.y, run.queue);
      });
    };
    const std::vector<ConvConfig> configs = AffineConvConfigs(*nodes.conv, nodes.shape);
    if (!choose_) return plan(configs.front());
    return plan(choose_({ShapeText(nodes.shape), configs, plan, {fed.begin(), fed.end()}, y}));
  }
  std::shared_ptr<const AffineConv> Affine(Shapes fed) const override {
    return fed.size() == 1 && lines_ != nullptr ? std::make_shared<const AffineConv>(NodesAt(fed[0]))
                                                : nullptr;
  }
  std::vector<uint8_t> Packed() const override { return conv_.Packed(); }

 private:
  AffineConv NodesAt(const TensorShape& x) const { return {lines_, conv_.Conv(), conv_.ShapeOf(x), {}}; }
  // Alone it has lines of its own, which most sessions need for no shape.
  const PackedNode& PackedAffine() const {
    const std::scoped_lock lock(packing_);
    if (affine_ == nullptr) affine_ = PackNode(affine_node_, device_);
    return *affine_;
  }

  ConvChooser choose_;
  ElementType made_type_;
  AffineNode affine_node_;
  Device device_;
  mutable std::mutex packing_;
  mutable PackedNodePtr affine_;
  PackedMatmul conv_;
  std::shared_ptr<const PackedLines> lines_;  // null where a channel has none: both run in turn
};

// Floats in, quantized on the way into the convolution. Out come its codes, or the largest ones of windows.
class PackedPixels final : public PackedNode {
 public:
  PackedPixels(const QuantizeNode& quantize, const MatmulNode& node, const MaxPoolNode* pool,
               const Device& device, std::shared_ptr<const PackedConv> conv)
      : geometry_(node.conv.geometry),
        has_residual_(node.conv.epilogue.has_residual),
        type_(node.conv.epilogue.y_signed ? ElementType::kInt8 : ElementType::kUInt8),
        conv_(std::move(conv)) {
    quantizer_.planes = quantize.to_channels_last;
    quantizer_.lo = quantize.grids.front().lo;
    quantizer_.hi = quantize.grids.front().hi;
    for (size_t c = 0; c < static_cast<size_t>(geometry_.in_channels); ++c) {
      const Quantizer& grid = quantize.grids[quantize.grids.size() == 1 ? 0 : c];
      quantizer_.scale.push_back(grid.scale);
      quantizer_.zero_point.push_back(grid.zero_point);
    }
    if (pool == nullptr) return;
    window_ = pool->window;
    pool_node_ = *pool;
    pool_ = PackNode(*pool, device);
  }

  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    const ConvShape shape = ShapeOf(fed);
    if (pool_ == nullptr) return PlanOf(PlanPixels(conv_, shape, quantizer_), has_residual_);
    const PooledConv pooled = PooledAt(shape, y);
    Require(y_planes_ == 0 || Pools(pooled), "a pooled convolution has no kernel that stores ", y_planes_,
            " planes; let it store bytes");
    if (Pools(pooled)) {
      const std::shared_ptr<const PooledPlan> plan = PlanPooled(pooled);
      return MakePlan(PlanText(*plan),
                      [plan](const Run& run) { LaunchPooled(*plan, run.fed[0], run.y, run.queue); });
    }
    const TensorShape between = MadeAt(shape);
    return PlanInTurn(PlanOf(PlanPixels(conv_, shape, quantizer_), has_residual_),
                      pool_->Plan(std::span(&between, 1), y), ElementCount(between.dims));
  }
  std::vector<uint8_t> Packed() const override { return SavePacked(*conv_); }

  // What it stores costs it nothing, however that lies.
  std::optional<double> Microseconds(Shapes fed, const TensorPlanes& planes) const override {
    if (pool_ == nullptr) return std::nullopt;
    const ConvShape shape = ShapeOf(fed);
    const TensorShape made = MadeAt(shape);
    PooledConv pooled = PooledAt(shape, OutputOf(pool_node_, std::span(&made, 1)));
    pooled.y_planes = planes.y;
    const bool fits = Pools(pooled) && planes.x == 0 && planes.added == 0;
    return fits ? std::optional(kStemPoolKernel.microseconds(pooled, conv_->On())) : std::nullopt;
  }
  PackedNodePtr InPlanes(const TensorPlanes& planes) const override {
    auto in_planes = std::make_unique<PackedPixels>(*this);
    in_planes->y_planes_ = planes.y;
    return in_planes;
  }

 private:
  TensorShape MadeAt(const ConvShape& shape) const {
    return {type_, {shape.batch, shape.out_h, shape.out_w, geometry_.out_channels}};
  }
  PooledConv PooledAt(const ConvShape& shape, const TensorShape& y) const {
    return {conv_, quantizer_, shape, window_, y.dims.at(1), y.dims.at(2), y_planes_};
  }
  ConvShape ShapeOf(Shapes fed) const {
    Require(!fed.empty() && fed[0].dims.size() == 4, "an image was expected, of rank 4");
    const std::vector<int64_t>& dims = fed[0].dims;
    const size_t first = quantizer_.planes ? 2 : 1;
    Require(dims[quantizer_.planes ? 1 : 3] == geometry_.in_channels, "the image has ",
            dims[quantizer_.planes ? 1 : 3], " channels, expected ", geometry_.in_channels);
    return InferConvShape(geometry_, dims[0], dims[first], dims[first + 1]);
  }

  ConvGeometry geometry_;
  bool has_residual_;
  ElementType type_;
  PixelQuantizer quantizer_;
  std::shared_ptr<const PackedConv> conv_;
  Window window_;
  NodeSpec pool_node_;
  std::shared_ptr<const PackedNode>
      pool_;  // for the shapes that have no kernel for both; null where nothing is pooled
  int y_planes_ = 0;
};

// nullptr where a block's shared memory is too small.
PackedNodePtr PackPixels(const QuantizeNode& quantize, const MatmulNode& conv, const MaxPoolNode* pool,
                         const Device& device, std::span<const uint8_t> packed, const StoredAs& stored = {}) {
  auto constants = PackConv(conv.conv, device, packed, stored);
  if (!FitsPixels(*constants)) return nullptr;
  return std::make_unique<PackedPixels>(quantize, conv, pool, device, std::move(constants));
}

// The numbers that an addition or a multiplication takes what a product makes for, by the bytes of the product's codes: what
// a table between them has, or the addition's own function of its second operand. Nothing for an addition that has neither,
// whose sum may be on a line.
std::optional<ResidualSum> TableSumOf(const LookupNode* lookup, const BinaryNode& add, bool made_first) {
  const BinarySpec& spec = add.spec;
  const bool has_function = !spec.b_table.empty(), multiplies = spec.kind == BinaryKind::kMul;
  if (!spec.quantizer.quantized || (has_function && made_first) ||
      (!has_function && lookup == nullptr && !multiplies) || (lookup != nullptr && lookup->channels != 1)) {
    return std::nullopt;
  }
  CodeGrid made{spec.a_signed, spec.a_scale, spec.a_zero_point},
      residuals{spec.b_signed, spec.b_scale, spec.b_zero_point};
  if (!made_first) std::swap(made, residuals);
  const Quantizer& y = spec.quantizer;
  ResidualSum sum{{}, residuals, {y.is_signed, y.scale, y.zero_point}, y.lo, y.hi, multiplies};
  for (size_t i = 0; i < 256; ++i) {
    const uint8_t byte = lookup != nullptr ? lookup->table[i] : static_cast<uint8_t>(i);
    const int32_t code = made.is_signed ? static_cast<int8_t>(byte) : byte;
    sum.values.push_back(has_function ? spec.b_table[byte]
                                      : DequantizeCode(code, made.scale, made.zero_point));
  }
  return sum;
}

}  // namespace

std::string ShapeText(const ConvShape& shape) {
  return std::to_string(shape.batch) + "x" + std::to_string(shape.in_h) + "x" + std::to_string(shape.in_w);
}

// Whether a shape has a kernel for both, ResidualPairConfigs says.
bool FusesResidual(const MatmulNode& first, const MatmulNode& second, const Device& device) {
  const auto fits = [](const MatmulNode& node) {
    const Epilogue& e = node.conv.epilogue;
    return !node.layout.is_gemm && MayRoundFours(e) && e.quantized_output &&
           node.conv.geometry.out_channels % 16 == 0 && PackedConv::FitsBoxes(node.conv);
  };
  const Epilogue &made = first.conv.epilogue, &adds = second.conv.epilogue;
  return device.capability == 90 && fits(first) && fits(second) && made.kind == adds.kind &&
         !made.has_residual && adds.has_residual;
}

// The addition's own numbers of the codes between are those of their quantizer: it alone states the codes.
std::optional<MatmulNode> WithResidual(const MatmulNode& conv, const BinaryNode& add, bool conv_first) {
  const BinarySpec& spec = add.spec;
  const Epilogue& e = conv.conv.epilogue;
  const bool is_tail = e.kind == EpilogueKind::kTail, has_thresholds = e.kind == EpilogueKind::kThresholds;
  const float scale = conv_first ? spec.a_scale : spec.b_scale;
  const int32_t zero_point = conv_first ? spec.a_zero_point : spec.b_zero_point;
  if (conv.layout.is_gemm || conv.layout.spatial > 2 || spec.kind != BinaryKind::kAdd ||
      !spec.b_table.empty() || !spec.quantizer.quantized || e.has_residual || !HasLines(e) ||
      (is_tail && scale != e.y_scale) ||
      (!has_thresholds && zero_point != (is_tail ? e.y_zero_point : e.zero_point)) ||
      (conv_first ? spec.a_signed : spec.b_signed) != e.y_signed) {
    return std::nullopt;
  }
  MatmulNode out = conv;
  Epilogue& to = out.conv.epilogue;
  to.adds_behind_tail = is_tail;
  to.has_residual = true;
  to.inner_scale = scale;
  if (is_tail) {
    to.zero_point = e.y_zero_point;
    to.lo = e.y_lo;
    to.hi = e.y_hi;
  } else if (has_thresholds) {
    const CodeRange codes = FirstCodesOf(e);
    to.zero_point = zero_point;
    to.lo = codes.lo;
    to.hi = codes.hi;
  }
  to.residual_scale = conv_first ? spec.b_scale : spec.a_scale;
  to.residual_zero_point = conv_first ? spec.b_zero_point : spec.a_zero_point;
  to.residual_signed = conv_first ? spec.b_signed : spec.a_signed;
  to.y_scale = spec.quantizer.scale;
  to.y_zero_point = spec.quantizer.zero_point;
  to.y_lo = spec.quantizer.lo;
  to.y_hi = spec.quantizer.hi;
  to.y_signed = spec.quantizer.is_signed;
  return out;
}

PackedNodePtr PackConvAdd(const MatmulNode& with_residual, const BinaryNode& add, bool conv_first,
                          const Device& device, ConvChooser choose, std::span<const uint8_t> packed) {
  return std::make_unique<PackedConvAdd>(with_residual, add, conv_first, device, std::move(choose), packed);
}

bool FusesTableSum(const MatmulNode& conv, const LookupNode* lookup, const BinaryNode& add, bool made_first) {
  const Epilogue& e = conv.conv.epilogue;
  if (conv.layout.is_gemm || conv.layout.spatial > 2 || !e.quantized_output || e.has_residual || StepsOf(e))
    return false;
  const std::optional<ResidualSum> sum = TableSumOf(lookup, add, made_first);
  return sum && FitsTableSum(*sum) &&
         (made_first ? add.spec.a_signed : add.spec.b_signed) ==
             (lookup != nullptr ? lookup->y_signed : e.y_signed);
}

PackedNodePtr PackTableSum(const MatmulNode& conv, const LookupNode* lookup, const BinaryNode& add,
                           bool made_first, const Device& device, ConvChooser choose,
                           std::span<const uint8_t> packed) {
  return std::make_unique<PackedConvAdd>(conv, add, made_first, device, std::move(choose), packed,
                                         StoredAs{{},
                                                  lookup != nullptr ? lookup->table : std::vector<uint8_t>(),
                                                  TableSumOf(lookup, add, made_first)});
}

bool FusesFloatSum(const MatmulNode& product, const FloatBinaryOp& add,
                   const std::optional<UnaryOp>& activation) {
  const Epilogue& e = product.conv.epilogue;
  return product.layout.spatial < 3 && !e.quantized_output && !e.has_residual &&
         add.kind == FloatBinaryKind::kAdd &&
         (!activation || activation->kind == UnaryKind::kRelu || activation->kind == UnaryKind::kClip);
}

PackedNodePtr PackFloatSum(const MatmulNode& product, const FloatBinaryOp& add,
                           const std::optional<UnaryOp>& activation, const Device& device, ConvChooser choose,
                           std::span<const uint8_t> packed) {
  Require(FusesFloatSum(product, add, activation), "a product and an addition that do not fit each other");
  return std::make_unique<PackedFloatSum>(product, activation, device, std::move(choose), packed);
}

PackedNodePtr PackResidualPair(const MatmulNode& first, const MatmulNode& second, const Device& device,
                               const ResidualPairChoosers& choosers, std::span<const uint8_t> packed) {
  return std::make_unique<PackedResidualPair>(first, second, device, choosers, packed);
}

// Whether a shape has a kernel for both, AffineConvConfigs says; whether each channel has a line,
// PackAffineConv, as steps are made by many threads.
bool FusesAffine(const AffineNode& affine, const MatmulNode& conv, const Device& device) {
  const ConvGeometry& g = conv.conv.geometry;
  const Epilogue& e = conv.conv.epilogue;
  const AffineSpec& spec = affine.spec;
  const bool is_padded = g.pad_top != 0 || g.pad_left != 0 || g.pad_bottom != 0 || g.pad_right != 0;
  const bool is_flat = g.Taps() == 1 && g.group == 1 && g.stride_h == 1 && g.stride_w == 1 && !is_padded;
  return device.capability == 90 && !conv.layout.is_gemm && is_flat && g.in_channels % 16 == 0 &&
         g.out_channels % 16 == 0 && e.quantized_output && !e.has_residual && MayRoundFours(e) &&
         conv.conv.x.encoding != Encoding::kBipolar && PackedConv::FitsBoxes(conv.conv) &&
         spec.quantizer.quantized &&
         spec.quantizer.is_signed == (conv.conv.x.encoding == Encoding::kSigned) &&
         (spec.channels == 1 || spec.channels == g.in_channels) && MayHaveLines(spec);
}

PackedNodePtr PackAffineConv(const AffineNode& affine, const MatmulNode& conv, const Device& device,
                             const AffineConvChoosers& choosers, std::span<const uint8_t> packed) {
  return std::make_unique<PackedAffineConv>(affine, conv, device, choosers, packed);
}

std::optional<ConvChain> FindChain(const PackedNode& first, std::span<const TensorShape> first_fed,
                                   const PackedNode& second, std::span<const TensorShape> second_fed) {
  const std::optional<ChainLink> made = first.Link(first_fed), read = second.Link(second_fed);
  if (!made || !read || read->residuals != nullptr) return std::nullopt;
  // Pixels are what counts: a product behind a convolution may see them as rows.
  if (made->shape.OutPixels() != read->shape.OutPixels()) return std::nullopt;
  return ConvChain{made->conv, read->conv, made->shape, made->residuals, made->residuals_shape};
}

std::optional<ConvChain> FindChain(const PackedNode& windows, std::span<const TensorShape> windows_fed,
                                   const PackedNode& first, std::span<const TensorShape> first_fed,
                                   const PackedNode& second, std::span<const TensorShape> second_fed) {
  const std::optional<ChainLink> made = windows.Link(windows_fed);
  std::optional<ConvChain> chain = FindChain(first, first_fed, second, second_fed);
  if (!made || !chain || made->residuals != nullptr || made->shape.OutPixels() != chain->shape.OutPixels())
    return std::nullopt;
  chain->windows = made->conv;
  chain->windows_shape = made->shape;
  return chain;
}

std::optional<BitBlocks> FindBitBlocks(std::span<const FedNode> nodes) {
  BitBlocks blocks;
  for (size_t i = 0; i < nodes.size(); ++i) {
    const std::optional<ChainLink> link = nodes[i].node->Link(nodes[i].fed);
    if (!link || link->residuals != nullptr) return std::nullopt;
    if (i == 0) blocks.shape = link->shape;
    const int planes = link->planes.x;
    const bool fits = planes > 0 && link->planes == TensorPlanes{planes, planes, i % 3 == 2 ? planes : 0} &&
                      link->shape == blocks.shape;
    if (!fits) return std::nullopt;
    if (i % 3 == 0) blocks.convs.emplace_back();
    blocks.convs.back()[i % 3] = link->conv;
  }
  return blocks;
}

bool FusesQuantize(const QuantizeNode& quantize, const MatmulNode& conv, const Device&) {
  const size_t grids = quantize.grids.size();
  return !conv.layout.is_gemm && conv.layout.spatial == 2 && FitsPixels(conv.conv) &&
         (grids == 1 || grids == static_cast<size_t>(conv.conv.geometry.in_channels)) &&
         quantize.grids.front().is_signed == (conv.conv.x.encoding == Encoding::kSigned);
}

PackedNodePtr PackQuantizedConv(const QuantizeNode& quantize, const MatmulNode& conv,
                                const LookupNode* lookup, const Device& device,
                                std::span<const uint8_t> packed) {
  if (!FusesQuantize(quantize, conv, device)) return nullptr;
  return PackPixels(quantize, conv, nullptr, device, packed,
                    StoredAs{{}, lookup ? lookup->table : std::vector<uint8_t>(), {}});
}

bool FusesPool(const QuantizeNode& quantize, const MatmulNode& conv, const MaxPoolNode& pool,
               const Device& device) {
  return FusesQuantize(quantize, conv, device) && quantize.to_channels_last &&
         FitsPooling(conv.conv, pool, device);
}

PackedNodePtr PackPooledConv(const QuantizeNode& quantize, const MatmulNode& conv, const MaxPoolNode& pool,
                             const Device& device, std::span<const uint8_t> packed) {
  return PackPixels(quantize, conv, &pool, device, packed);
}

// Products alone: the large outputs of convolutions take the faster epilogues that end in codes.
bool FusesDequantize(const MatmulNode& matmul, const DequantizeNode& dequantize) {
  const AffineSpec& grid = dequantize.spec;
  return matmul.layout.is_gemm && matmul.conv.epilogue.quantized_output && grid.channels == 1 &&
         !grid.has_affine && !grid.quantizer.quantized && !dequantize.to_channels_first;
}

PackedNodePtr PackDequantizedMatmul(const MatmulNode& matmul, const DequantizeNode& dequantize,
                                    const Device& device, ConvChooser choose,
                                    std::span<const uint8_t> packed) {
  const AffineSpec& grid = dequantize.spec;
  return std::make_unique<PackedMatmul>(
      matmul, device, std::move(choose), packed,
      StoredAs{CodeGrid{grid.x_signed, grid.x_scale.front(), grid.x_zero_point.front()}, {}, {}});
}

bool FusesLookup(const MatmulNode& matmul, const LookupNode& lookup) {
  const Epilogue& e = matmul.conv.epilogue;
  return matmul.layout.spatial < 3 && lookup.channels == 1 && e.quantized_output && !e.has_residual;
}

PackedNodePtr PackMappedMatmul(const MatmulNode& matmul, const LookupNode& lookup, const Device& device,
                               ConvChooser choose, std::span<const uint8_t> packed) {
  return std::make_unique<PackedMatmul>(matmul, device, std::move(choose), packed,
                                        StoredAs{{}, lookup.table, {}});
}

PackedNodePtr PackMatmul(const MatmulNode& node, const Device& device, ConvChooser choose,
                         std::span<const uint8_t> packed) {
  return std::make_unique<PackedMatmul>(node, device, std::move(choose), packed);
}

}  // namespace lowbit::cuda
