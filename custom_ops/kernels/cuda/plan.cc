// Packing, plans and launches: everything of a node that happens before its kernel.
//
// The tile kernels sum products of bytes. Let w' be the packed weight (int8), q the activation's code and
// z_x, z_w the zero points that are left; with padding taps reading the code z_x,
//   sum over the taps in the image of (q - z_x)(w' - z_w)
//     = S(q w') - z_x S(w') - z_w x_sum,   S over all taps, x_sum = sum over the taps in the image of (q -
//     z_x)
// The middle term depends on the channel alone and is folded into the bias. The last one is there only where
// w - z_w leaves int8: everywhere else z_w is subtracted while packing. Bipolar activations are repacked to
// {-1, +1}, whose padding is 0.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "core/status.h"
#include "kernels/cuda/cuda_conv.h"
#include "kernels/cuda/heuristic.h"
#include "kernels/cuda/kernels.h"

namespace lowbit::cuda {
namespace {

constexpr int64_t kMaxBytes = std::numeric_limits<int32_t>::max();

void Check(cudaError_t error, const char* what) {
  Require(error == cudaSuccess, "CUDA: ", what, " failed: ", cudaGetErrorString(error));
}

int64_t RoundUp(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal) {
    Check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != ordinal) Check(cudaSetDevice(ordinal), "cudaSetDevice");
    changed_ = previous_ != ordinal;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// One allocation, filled once.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  ~DeviceMemory() {
    if (data_ != nullptr) cudaFree(data_);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void Upload(const void* source, size_t bytes) {
    Check(cudaMalloc(&data_, bytes), "allocating a node's constants");
    Check(cudaMemcpy(data_, source, bytes, cudaMemcpyHostToDevice), "copying a node's constants");
  }
  const uint8_t* At(size_t offset) const { return static_cast<const uint8_t*>(data_) + offset; }

 private:
  void* data_ = nullptr;
};

// Collects constants on the host; an offset stands for each until they are uploaded together.
class ConstantBuilder {
 public:
  static constexpr size_t kAbsent = ~size_t{0};

  size_t Add(const void* data, size_t bytes) {
    const size_t offset = bytes_.size();
    bytes_.resize(offset + static_cast<size_t>(RoundUp(static_cast<int64_t>(bytes), 256)));
    std::memcpy(bytes_.data() + offset, data, bytes);
    return offset;
  }
  template <typename T>
  size_t Add(const std::vector<T>& values) {
    return values.empty() ? kAbsent : Add(values.data(), values.size() * sizeof(T));
  }
  const std::vector<uint8_t>& Bytes() const { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};

FastDivisor MakeDivisor(int64_t divisor) {
  FastDivisor d;
  d.divisor = static_cast<uint32_t>(divisor);
  while ((int64_t{1} << d.shift) < divisor) ++d.shift;
  d.multiplier = static_cast<uint32_t>((uint64_t{1} << 32) *
                                           ((uint64_t{1} << d.shift) - static_cast<uint64_t>(divisor)) /
                                           static_cast<uint64_t>(divisor) +
                                       1);
  return d;
}

// Weights as int8 and the zero points that stay outside of them.
struct Int8Weights {
  std::vector<int8_t> values;  // logical order of ConvSpec::weights
  std::vector<int32_t> zero;   // [out_channels]
  std::vector<int64_t> sum;    // [out_channels]
};

Int8Weights ToInt8(const ConvSpec& spec) {
  const int64_t channels = spec.geometry.out_channels, k = spec.geometry.K();
  Int8Weights out;
  out.values.resize(static_cast<size_t>(channels * k));
  out.zero.assign(static_cast<size_t>(channels), 0);
  out.sum.assign(static_cast<size_t>(channels), 0);
  for (int64_t c = 0; c < channels; ++c) {
    int32_t lowest = 0, highest = 0;
    for (int64_t i = 0; i < k; ++i) {
      lowest = std::min(lowest, spec.WeightValue(c, c * k + i));
      highest = std::max(highest, spec.WeightValue(c, c * k + i));
    }
    int32_t shift = 0;
    if (lowest < -128 || highest > 127) {
      // Codes span at most 256 values: all of them less 128, or as they are, fit.
      shift = (spec.w.encoding == Encoding::kUnsigned ? 128 : 0) - spec.w_zero_point[static_cast<size_t>(c)];
      out.zero[static_cast<size_t>(c)] = -shift;
    }
    for (int64_t i = 0; i < k; ++i) {
      const int32_t value = spec.WeightValue(c, c * k + i) - shift;
      out.values[static_cast<size_t>(c * k + i)] = static_cast<int8_t>(value);
      out.sum[static_cast<size_t>(c)] += value;
    }
  }
  return out;
}

std::vector<uint8_t> PackRows(const ConvGeometry& g, const Int8Weights& w) {
  const int64_t padded = RoundUp(g.GroupIn(), 4);
  std::vector<uint8_t> out(static_cast<size_t>(g.out_channels * g.Taps() * padded));
  for (int64_t row = 0; row < g.out_channels * g.Taps(); ++row) {
    std::memcpy(out.data() + row * padded, w.values.data() + row * g.GroupIn(),
                static_cast<size_t>(g.GroupIn()));
  }
  return out;
}

// Where channel n lies among the rows of B: within 16, channels 4 q + {0, 1} are rows 2 q + {0, 1} and
// channels 4 q + {2, 3} rows 8 + 2 q + {0, 1}. FinishTile has four neighbouring channels in a thread thereby.
int64_t InterleavedRow(int64_t n) { return n / 16 * 16 + n % 4 / 2 * 8 + n % 16 / 4 * 2 + n % 2; }

// [group][k / 128][n_padded][128], the 16-byte chunk c of row r at position c ^ (r % 8).
std::vector<uint8_t> PackTiles(const ConvGeometry& g, const Int8Weights& w, int64_t channels,
                               int64_t n_padded) {
  const int64_t k_tiles = RoundUp(g.Taps() * channels, kTileK) / kTileK;
  std::vector<uint8_t> out(static_cast<size_t>((g.group * k_tiles * n_padded + kWeightSlackRows) * kTileK));
  for (int64_t c = 0; c < g.out_channels; ++c) {
    const int64_t group = c / g.GroupOut(), r = InterleavedRow(c % g.GroupOut());
    for (int64_t tap = 0; tap < g.Taps(); ++tap) {
      for (int64_t i = 0; i < g.GroupIn(); ++i) {
        const int64_t k = tap * channels + i, chunk = k % kTileK / 16;
        const int64_t row = (group * k_tiles + k / kTileK) * n_padded + r;
        out[static_cast<size_t>(row * kTileK + ((chunk ^ (r % 8)) * 16) + k % 16)] =
            static_cast<uint8_t>(w.values[static_cast<size_t>((c * g.Taps() + tap) * g.GroupIn() + i)]);
      }
    }
  }
  return out;
}

const char* AlgorithmName(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kPlain:
      return "plain";
    case Algorithm::kMma:
      return "mma";
    case Algorithm::kWgmma:
      return "wgmma";
  }
  return "";
}

}  // namespace

Device Device::Query(int ordinal) {
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  Device device;
  device.ordinal = ordinal;
  device.capability = 10 * properties.major + properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  // 4 KB stay for a kernel's static shared memory.
  device.shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin) - 4096;
  device.name = properties.name;
  Require(device.capability >= 75, device.name, " has compute capability ", properties.major, ".",
          properties.minor, ", lowbit needs 7.5 or later (int8 Tensor Cores)");
  return device;
}

std::string ConvConfig::Text() const {
  if (algorithm == Algorithm::kPlain) return "plain";
  std::string text = std::string(AlgorithmName(algorithm)) + "_" + std::to_string(tile_m) + "x" +
                     std::to_string(tile_n) + "_stages" + std::to_string(stages);
  if (producers) text += "_producers";
  if (splits > 1) text += (split == Split::kCluster ? "_cluster" : "_split") + std::to_string(splits);
  if (multicast > 1) text += "_multicast" + std::to_string(multicast);
  return text;
}

class PackedConv {
 public:
  PackedConv(const ConvSpec& spec, const Device& device)
      : geometry_(spec.geometry), x_(spec.x), x_zero_(spec.x_zero_point), device_(device) {
    const ConvGeometry& g = geometry_;
    Require(g.out_channels <= kMaxBytes && g.K() <= kMaxBytes, "weights of ", g.out_channels, " x ", g.K(),
            " are too large for the GPU kernels");
    // Positions are pairs of 16-bit numbers: sizes, pads and windows stay below 2^14 together.
    tiled_ = !g.transposed && (g.group == 1 || (g.GroupIn() >= 16 && g.GroupOut() >= 16)) &&
             (g.kernel_h - 1) * g.dilation_h < 4096 && (g.kernel_w - 1) * g.dilation_w < 4096 &&
             std::max({g.pad_top, g.pad_left, g.pad_bottom, g.pad_right}) < 4096;
    vector16_ = g.GroupIn() % 16 == 0;
    channels_ = RoundUp(g.GroupIn(), 4);
    n_padded_ = RoundUp(g.GroupOut(), 32);
    repacks_ = x_.encoding == Encoding::kBipolar || channels_ != g.GroupIn();

    const Int8Weights weights = ToInt8(spec);
    has_w_zero_ = std::any_of(weights.zero.begin(), weights.zero.end(), [](int32_t z) { return z != 0; });
    std::vector<int32_t> bias(spec.bias);
    for (size_t c = 0; tiled_ && c < bias.size(); ++c) {
      // Modulo 2^32, as every sum of the kernels.
      bias[c] =
          static_cast<int32_t>(static_cast<uint32_t>(bias[c]) -
                               static_cast<uint32_t>(TileZero()) * static_cast<uint32_t>(weights.sum[c]));
    }

    ConstantBuilder builder;
    rows_at_ = builder.Add(PackRows(g, weights));
    if (tiled_) tiles_at_ = builder.Add(PackTiles(g, weights, channels_, n_padded_));
    AddEpilogue(spec, weights, bias, builder);
    DeviceGuard guard(device.ordinal);
    memory_.Upload(builder.Bytes().data(), builder.Bytes().size());
    ResolveEpilogue();
  }

  const ConvGeometry& Geometry() const { return geometry_; }
  const Device& On() const { return device_; }
  bool Repacks() const { return repacks_; }
  bool NeedsPixelSums() const { return has_w_zero_; }
  int64_t Channels() const { return channels_; }
  bool XSigned() const { return x_.encoding == Encoding::kSigned; }
  bool Bipolar() const { return x_.encoding == Encoding::kBipolar; }
  // The code of real zero as the tile kernels see the input.
  int32_t TileZero() const { return Bipolar() ? 0 : x_zero_; }

  GemmProblem Problem(const ConvShape& shape) const {
    GemmProblem problem{shape.OutPixels(), geometry_.GroupOut(), geometry_.Taps() * channels_,
                        geometry_.group};
    problem.tiled = tiled_ && std::max(shape.in_h, shape.in_w) < 8192 &&
                    shape.batch * shape.in_h * shape.in_w * geometry_.group * channels_ <= kMaxBytes;
    problem.vector16 = vector16_;
    problem.requantizes = epilogue_.kind == static_cast<int>(EpilogueKind::kRequantize) &&
                          epilogue_.quantized_output && !has_w_zero_ && geometry_.GroupOut() % 16 == 0;
    return problem;
  }

  // Everything but the pointers of a launch.
  ConvParams Params(const ConvShape& s, const ConvConfig& config) const {
    const ConvGeometry& g = geometry_;
    const bool plain = config.algorithm == Algorithm::kPlain;
    const auto narrow = [](int64_t v) { return static_cast<int>(v); };
    ConvParams p;
    p.epilogue = epilogue_;
    p.m = narrow(s.OutPixels());
    p.n = narrow(g.GroupOut());
    p.groups = narrow(g.group);
    p.in_h = narrow(s.in_h);
    p.in_w = narrow(s.in_w);
    p.out_h = narrow(s.out_h);
    p.out_w = narrow(s.out_w);
    p.stride_h = narrow(g.stride_h);
    p.stride_w = narrow(g.stride_w);
    p.pad_top = narrow(g.pad_top);
    p.pad_left = narrow(g.pad_left);
    p.kernel_h = narrow(g.kernel_h);
    p.kernel_w = narrow(g.kernel_w);
    p.dilation_h = narrow(g.dilation_h);
    p.dilation_w = narrow(g.dilation_w);
    p.transposed = g.transposed;
    if (plain) {
      p.weights = memory_.At(rows_at_);
      p.epilogue.bias = reinterpret_cast<const int32_t*>(memory_.At(plain_bias_at_));
      p.channels = narrow(g.GroupIn());
      p.pixel_bytes = narrow(g.in_channels);
      p.x_mul = Bipolar() ? 2 : 1;
      p.x_zero = Bipolar() ? 1 : x_zero_;
      return p;
    }
    p.weights = memory_.At(tiles_at_);
    p.channels = narrow(channels_);
    p.pixel_bytes = narrow(channels_ * g.group);
    p.k = narrow(g.Taps() * channels_);
    p.k_tiles = narrow(RoundUp(p.k, kTileK) / kTileK);
    p.n_padded = narrow(n_padded_);
    p.n_tiles = narrow((g.GroupOut() + config.tile_n - 1) / config.tile_n);
    p.splits = config.splits;
    while ((1 << p.split_shift) < p.splits) ++p.split_shift;  // a power of 2
    p.stages = config.stages;
    p.multicast = config.multicast;
    const GemmProblem problem = Problem(s);
    p.in_registers = problem.requantizes && config.splits == 1;
    p.requantizes_fours = problem.requantizes;
    p.shared_bytes = SharedBytes(problem, config);
    // Unsplit sums may overwrite the tiles.
    p.exchange_offset = config.splits > 1 ? TileBytes(config) : 0;
    p.by_image = MakeDivisor(std::max<int64_t>(1, s.out_h * s.out_w));
    p.by_row = MakeDivisor(std::max<int64_t>(1, s.out_w));
    p.by_channels = MakeDivisor(channels_);
    p.by_kernel_w = MakeDivisor(g.kernel_w);
    // Taps that are never inside may overflow; their offsets are never used.
    p.tap_step = static_cast<int>(g.dilation_w * p.pixel_bytes - channels_);
    p.tap_row_step = static_cast<int>((g.dilation_h * s.in_w - g.kernel_w * g.dilation_w) * p.pixel_bytes);
    p.tap_row_position = static_cast<int>(g.dilation_h * 65536 - g.kernel_w * g.dilation_w);
    p.fill = static_cast<uint32_t>(TileZero() & 255) * 0x01010101u;
    p.last_position = (p.in_h - 1) * 65536 + p.in_w - 1;
    p.all_inside = g.pad_top == 0 && g.pad_left == 0 &&
                   (s.out_h - 1) * g.stride_h + (g.kernel_h - 1) * g.dilation_h < s.in_h &&
                   (s.out_w - 1) * g.stride_w + (g.kernel_w - 1) * g.dilation_w < s.in_w;
    return p;
  }

 private:
  void AddEpilogue(const ConvSpec& spec, const Int8Weights& weights, const std::vector<int32_t>& bias,
                   ConstantBuilder& builder) {
    const Epilogue& e = spec.epilogue;
    Require(e.tail.size() <= kMaxTailSteps, "the tail has ", e.tail.size(), " steps, expected at most ",
            kMaxTailSteps);
    // Thresholds have none; kernels read it all the same.
    std::vector<float> scale = e.kind == EpilogueKind::kRequantize ? e.multiplier : e.acc_scale;
    scale.resize(static_cast<size_t>(geometry_.out_channels));
    plain_bias_at_ = builder.Add(spec.bias);
    at_ = {builder.Add(bias),
           builder.Add(scale),
           has_w_zero_ ? builder.Add(weights.zero) : ConstantBuilder::kAbsent,
           builder.Add(e.thresholds),
           builder.Add(e.base),
           builder.Add(e.dir),
           builder.Add(e.tail_bias),
           builder.Add(e.tail_scale),
           builder.Add(e.tail_shift)};
    EpilogueParams& p = epilogue_;
    p.kind = static_cast<int>(e.kind);
    p.quantized_output = e.quantized_output;
    p.has_residual = e.has_residual;
    p.residual_signed = e.residual_signed;
    p.out_channels = static_cast<int>(geometry_.out_channels);
    p.zero_point = e.zero_point;
    p.lo = e.lo;
    p.hi = e.hi;
    p.threshold_count = static_cast<int>(e.threshold_count);
    p.tail_count = static_cast<int>(e.tail.size());
    for (size_t i = 0; i < e.tail.size(); ++i) p.tail[i] = static_cast<uint8_t>(e.tail[i]);
    p.clip_min = e.clip_min;
    p.clip_max = e.clip_max;
    p.residual_scale = e.residual_scale;
    p.inner_scale = e.inner_scale;
    p.y_scale = e.y_scale;
    p.residual_zero_point = e.residual_zero_point;
    p.y_zero_point = e.y_zero_point;
    p.y_lo = e.y_lo;
    p.y_hi = e.y_hi;
  }

  void ResolveEpilogue() {
    const auto ints = [&](size_t at) {
      return at == ConstantBuilder::kAbsent ? nullptr : reinterpret_cast<const int32_t*>(memory_.At(at));
    };
    const auto floats = [&](size_t at) {
      return at == ConstantBuilder::kAbsent ? nullptr : reinterpret_cast<const float*>(memory_.At(at));
    };
    epilogue_.bias = ints(at_.bias);
    epilogue_.scale = floats(at_.scale);
    epilogue_.w_zero = ints(at_.w_zero);
    epilogue_.thresholds = ints(at_.thresholds);
    epilogue_.base = ints(at_.base);
    epilogue_.dir = ints(at_.dir);
    epilogue_.tail_bias = floats(at_.tail_bias);
    epilogue_.tail_scale = floats(at_.tail_scale);
    epilogue_.tail_shift = floats(at_.tail_shift);
  }

  struct Offsets {
    size_t bias, scale, w_zero, thresholds, base, dir, tail_bias, tail_scale, tail_shift;
  };

  ConvGeometry geometry_;
  OperandType x_;
  int32_t x_zero_;
  Device device_;
  bool tiled_ = false, vector16_ = false, repacks_ = false, has_w_zero_ = false;
  int64_t channels_ = 0, n_padded_ = 0;
  size_t rows_at_ = 0, tiles_at_ = 0, plain_bias_at_ = 0;
  Offsets at_ = {};
  EpilogueParams epilogue_;
  DeviceMemory memory_;
};

class ConvPlan {
 public:
  ConvPlan(std::shared_ptr<const PackedConv> conv, const ConvShape& shape, const ConvConfig& config)
      : conv_(std::move(conv)), shape_(shape), config_(config), params_(conv_->Params(shape, config)) {
    if (config.algorithm == Algorithm::kPlain) return;
    const auto reserve = [&](int64_t bytes) {
      const size_t at = workspace_;
      workspace_ += static_cast<size_t>(RoundUp(bytes, 256));
      return at;
    };
    if (conv_->Repacks()) x_at_ = reserve(InPixels() * params_.pixel_bytes);
    if (conv_->NeedsPixelSums()) sums_at_ = reserve(int64_t{params_.groups} * params_.m * 4);
    if (config.splits > 1 && config.split == Split::kWorkspace) {
      partial_at_ = reserve(int64_t{config.splits} * params_.groups * params_.m * params_.n * 4);
    }
  }

  const ConvConfig& Config() const { return config_; }
  size_t WorkspaceBytes() const { return workspace_; }

  void Launch(const void* x, const void* residual, void* y, void* workspace, cudaStream_t stream,
              bool overlap) const {
    if (params_.m == 0 || params_.n == 0) return;
    DeviceGuard guard(conv_->On().ordinal);
    LaunchOptions options;
    options.stream = stream;
    options.shared_limit = conv_->On().shared_bytes;
    options.overlap = overlap && conv_->On().capability >= 90;
    options.x_signed = conv_->XSigned();
    ConvParams p = params_;
    p.x = static_cast<const uint8_t*>(x);
    p.residual = residual;
    p.y = y;
    if (config_.algorithm == Algorithm::kPlain) {
      Check(LaunchPlain(p, options), "launching a convolution");
      return;
    }
    uint8_t* const scratch = static_cast<uint8_t*>(workspace);
    if (conv_->Repacks()) {
      RepackParams repack;
      repack.x = p.x;
      repack.y = scratch + x_at_;
      repack.pixels = InPixels();
      repack.groups = p.groups;
      repack.group_in = static_cast<int>(conv_->Geometry().GroupIn());
      repack.channels = p.channels;
      repack.mul = conv_->Bipolar() ? 2 : 1;
      repack.sub = conv_->Bipolar() ? 1 : 0;
      Check(LaunchRepack(repack, options), "launching a repacking");
      p.x = repack.y;
    }
    options.x_signed = conv_->XSigned() || conv_->Bipolar();
    options.vector16 = conv_->Problem(shape_).vector16;
    if (conv_->NeedsPixelSums()) {
      int32_t* const sums = reinterpret_cast<int32_t*>(scratch + sums_at_);
      Check(
          LaunchPixelSums(p, static_cast<int>(conv_->Geometry().GroupIn()), conv_->TileZero(), sums, options),
          "launching pixel sums");
      p.x_sums = sums;
    }
    if (config_.splits > 1 && config_.split == Split::kWorkspace) {
      p.partial = reinterpret_cast<int32_t*>(scratch + partial_at_);
    }
    Check(config_.algorithm == Algorithm::kWgmma ? LaunchWgmma(p, config_, options)
                                                 : LaunchMma(p, config_, options),
          "launching a convolution");
    if (p.partial != nullptr) Check(LaunchReduce(p, options), "launching a reduction");
  }

 private:
  int64_t InPixels() const { return shape_.batch * shape_.in_h * shape_.in_w; }

  std::shared_ptr<const PackedConv> conv_;
  ConvShape shape_;
  ConvConfig config_;
  ConvParams params_;
  size_t workspace_ = 0, x_at_ = 0, sums_at_ = 0, partial_at_ = 0;
};

std::shared_ptr<const PackedConv> PackConv(const ConvSpec& spec, const Device& device) {
  return std::make_shared<const PackedConv>(spec, device);
}

std::vector<ConvConfig> CandidateConfigs(const PackedConv& conv, const ConvShape& shape) {
  return RankConfigs(conv.Problem(shape), conv.On());
}

std::shared_ptr<const ConvPlan> PlanConv(std::shared_ptr<const PackedConv> conv, const ConvShape& shape,
                                         const std::optional<ConvConfig>& config) {
  Require(shape.OutPixels() <= kMaxBytes && shape.OutPixels() * conv->Geometry().out_channels <= kMaxBytes,
          "the output of ", shape.OutPixels(), " pixels and ", conv->Geometry().out_channels,
          " channels is too large for the GPU kernels");
  const std::vector<ConvConfig> candidates = CandidateConfigs(*conv, shape);
  if (config.has_value()) {
    Require(std::find(candidates.begin(), candidates.end(), *config) != candidates.end(), "configuration ",
            config->Text(), " does not apply to this node, for example ", candidates.front().Text(), " does");
  }
  return std::make_shared<const ConvPlan>(std::move(conv), shape, config.value_or(candidates.front()));
}

std::shared_ptr<const ConvPlan> PlanConv(const ConvSpec& spec, const ConvShape& shape, const Device& device) {
  return PlanConv(PackConv(spec, device), shape);
}

const ConvConfig& PlanConfig(const ConvPlan& plan) { return plan.Config(); }

size_t PlanWorkspaceBytes(const ConvPlan& plan) { return plan.WorkspaceBytes(); }

void LaunchConv(const ConvPlan& plan, const void* x, const void* residual, void* y, void* workspace,
                cudaStream_t stream, bool overlap) {
  plan.Launch(x, residual, y, workspace, stream, overlap);
}

ConvConfig TuneConv(const std::shared_ptr<const PackedConv>& conv, const ConvShape& shape,
                    const std::function<double(const ConvPlan&)>& measure, size_t limit) {
  std::vector<ConvConfig> candidates = CandidateConfigs(*conv, shape);
  candidates.resize(std::min(candidates.size(), std::max<size_t>(limit, 1)));
  const ConvConfig* best = nullptr;
  double best_time = 0;
  for (const ConvConfig& candidate : candidates) {
    const double time = measure(*PlanConv(conv, shape, candidate));
    if (best == nullptr || time < best_time) {
      best = &candidate;
      best_time = time;
    }
  }
  return *best;
}

}  // namespace lowbit::cuda
