// The constants of a convolution in one device's memory, and the launch parameters that follow from them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cuda/conv/channel_lines.h"
#include "kernels/cuda/conv/conv_params.h"
#include "kernels/cuda/conv/conv_row.h"
#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/conv/weight_layouts.h"
#include "kernels/cuda/device/memory.h"

namespace lowbit::cuda {

// Throws Error where a tensor that kernels copy 16 bytes at a time begins elsewhere; null is none.
void RequireAligned(std::initializer_list<const void*> tensors);
// A tail of a float bias or none, a function or none and the residual or none, one of the latter two at least,
// that ends in codes, scales being normal numbers.
struct TailSteps {
  bool has_bias = false;
  TailFunction function = TailFunction::kNone;
};
std::optional<TailSteps> StepsOf(const Epilogue& epilogue);
// Whether kernels may round four of its sums at once. PackedConv may find that they do not.
bool MayRoundFours(const Epilogue& epilogue);
// Whether residuals may be added to what a table has, or multiplied with it: no result is infinite, and a multiplication by
// 1 / y's scale in two parts gives the codes of the division.
bool FitsTableSum(const ResidualSum& sum);
// Whether a larger sum never gives a smaller code, or would not where WithRisingThresholds applies.
bool MayRise(const Epilogue& epilogue);

class ConstantBuilder;

// The same convolution of codes as they are, bits, by doubled weights: with x = 2c - 1, w x = 2w (c - 1/2),
// as if their zero point were 1/2. nullopt where x is not bipolar, twice the weights are no int8, or there is
// padding whose part of sums no table has (BorderOf).
std::optional<ConvSpec> OfBits(const ConvSpec& spec);

// The same thresholds of sums, all of which codes rise with: those of a channel whose codes fall are of its
// negated sums. nullopt where none falls, or weights are no int8 then.
std::optional<ConvSpec> WithRisingThresholds(const ConvSpec& spec);

class PackedConv {
 public:
  // `image`: what Bytes() of the same node gave, or empty: then the weights are packed.
  PackedConv(const ConvSpec& spec, const Device& device, std::span<const uint8_t> image,
             const StoredAs& stored = {});

  const ConvGeometry& Geometry() const { return geometry_; }
  const Device& On() const { return device_; }
  bool Repacks() const { return repacks_; }
  int64_t Channels() const { return channels_; }
  bool XSigned() const { return x_.encoding == Encoding::kSigned; }
  bool Bipolar() const { return x_.encoding == Encoding::kBipolar; }
  // The code of real zero as the tile kernels see the input. Of bits it is none.
  int32_t TileZero() const { return Bipolar() ? 0 : x_zero_; }

  // Whether zero points under padding are made good for by what is added to the sums of windows at borders.
  static bool FitsBorders(const ConvSpec& spec);
  // Whether the tensor memory accelerator can fetch what the taps of pixels read.
  static bool FitsBoxes(const ConvSpec& spec);

  // has_places: codes are stored elsewhere besides (ConvPlaces).
  ConvProblem Problem(const ConvShape& shape, bool has_places = false, const TensorPlanes& planes = {}) const;
  // Whether kernels may read the input in so many planes, and store codes so.
  bool MayReadPlanes(int planes) const;
  bool MayStorePlanes(int planes) const;
  // Residuals.
  bool MayAddPlanes(int planes) const;
  // Everything but a launch's tensors. `may_be_floats`: sums may have another form than integers.
  ConvParams Params(const ConvShape& shape, const ConvConfig& config, bool may_be_floats = true) const;
  // The weights of cells; nullptr where there are none or the codes may not rise with the sums.
  const uint8_t* CellWeights() const;
  // Of kernels that round four sums at once.
  const EpilogueParams& EpilogueOf() const { return epilogue_; }
  std::vector<uint8_t> Bytes() const;

 private:
  struct Offsets {
    size_t bias, scale, gain, offset, factor, float_bias, start, w_zero, thresholds, base, dir, tail_bias,
        tail_scale, tail_shift, steps, last_steps, step_flips;
  };
  // By channel: what it sums to, and its line or what stands for one (EpilogueParams::scale, start); by four,
  // factors.
  struct ChannelConstants {
    std::vector<int32_t> bias, shift;
    std::vector<SumRange> sums;
    std::vector<float> gain, offset, factor;

    explicit ChannelConstants(size_t count)
        : bias(count), shift(count), gain(count), offset(count), factor((count + 3) / 4, 1.0f) {}
  };

  // The layout is one that the node has.
  const uint8_t* WeightsIn(const WeightLayout& layout) const;
  // The zero point times a sum of weights.
  int32_t ZeroTimes(int32_t weights) const;
  void AddWeights(const Int8Weights& weights, ConstantBuilder& builder);
  void AddBorder(const Int8Weights& weights, ConstantBuilder& builder);
  void AddTableSum(const ResidualSum& sum, ConstantBuilder& builder);
  ChannelConstants ConstantsOf(const ConvSpec& spec, const Int8Weights& weights) const;
  // The channels' lines. After SetEpilogue.
  void FitLines(const Epilogue& e, ChannelConstants& channels) const;
  // Whether sums may have the form, whatever the input holds, and are rounded as SetRounding has it. After
  // SetEpilogue.
  bool Allows(SumForm form, const Epilogue& e, const ChannelConstants& channels) const;
  void SetRounding(const Epilogue& e, ChannelConstants& channels);
  void AddEpilogue(const ConvSpec& spec, const Int8Weights& weights, const ChannelConstants& channels,
                   ConstantBuilder& builder);
  // EpilogueParams::steps and step_flips.
  bool HasSteps(const Epilogue& e) const;
  void FindSteps(const Epilogue& e, const ChannelConstants& channels, std::vector<int32_t>& steps,
                 std::vector<int32_t>& last_steps, std::vector<uint8_t>& flips) const;
  void SetEpilogue(const Epilogue& epilogue);
  void ResolveEpilogue();

  ConvGeometry geometry_;
  OperandType x_;
  int32_t x_zero_ = 0;
  Device device_;
  bool tiled_ = false, vector16_ = false, boxes_ = false, borders_ = false, repacks_ = false,
       has_w_zero_ = false, rounds_fours_ = false, divides_fast_ = true, rises_ = false;
  bool is_bits_ = false;      // OfBits
  bool float_lines_ = false;  // sums that are multiplied as integers lie on lines as floats
  int64_t channels_ = 0;
  WeightBits w_bits_;
  size_t weights_at_ = 0, plain_bias_at_ = 0, table_at_ = 0, values_at_ = 0, border_at_ = 0;
  std::vector<std::pair<const WeightLayout*, size_t>> own_weights_at_;
  Offsets at_ = {};
  SumForm sum_form_ = SumForm::kInteger;
  EpilogueParams epilogue_;
  DeviceMemory memory_;
};

}  // namespace lowbit::cuda
