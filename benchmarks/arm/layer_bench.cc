// Runs convolutions one after the other, each once to warm up and once in a marked region, for tools that
// cost programs under emulation (benchmarks/arm_layers.py), or that count on a machine.
//
//   lowbit_arm_bench [--check] CASE...
//
// A case is one argument: the row of the kernel table or `auto`, bits and encoding (u, s, b) of activations,
// the same of weights, 1 where the weights leave out the least code, input channels, height, width, output
// channels, kernel, stride, pad, groups:
//
//   lowbit_arm_bench "auto 8 u 8 s 1 64 56 56 64 3 1 1 1"
//
// A region is a whole layer: channels-last codes in, requantized codes out, everything in between; the
// weights were packed before. Case k, counted from 0, is between the calls getpriority(kRegionMark, 2k) and
// getpriority(kRegionMark, 2k + 1), which every kernel answers with EINVAL and an emulator sees. A line of
// JSON is printed for each: the level (LOWBIT_ISA caps it), the row that ran, the cycles that selection
// expected, the bytes of packed weights and of scratch memory.
//
// --check compares with the reference kernel in every element; any difference is an error.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/conv.h"
#include "core/cpu/isa.h"
#include "core/cpu/kernel_table.h"
#include "core/status.h"
#include "core/thread_pool.h"

namespace lowbit {
namespace {

constexpr long kRegionMark = 0x41524d43;

void Mark(long value) { syscall(SYS_getpriority, kRegionMark, value); }

struct Case {
  std::string row;
  OperandType x, w;
  bool narrow = false;
  int64_t height = 0, width = 0;
  ConvGeometry geometry;
};

Encoding EncodingFrom(char letter) {
  switch (letter) {
    case 'u':
      return Encoding::kUnsigned;
    case 's':
      return Encoding::kSigned;
    case 'b':
      return Encoding::kBipolar;
    default:
      Fail("the encoding '", std::string(1, letter), "' is none of u, s, b");
  }
}

Case ParseCase(const std::string& text) {
  Case c;
  ConvGeometry& g = c.geometry;
  char x = 0, w = 0;
  int64_t kernel = 0, stride = 0, pad = 0;
  std::istringstream in(text);
  in >> c.row >> c.x.bits >> x >> c.w.bits >> w >> c.narrow >> g.in_channels >> c.height >> c.width >>
      g.out_channels >> kernel >> stride >> pad >> g.group;
  Require(!in.fail() && (in >> std::ws).eof(), "this is no case of 14 fields: ", text);
  c.x.encoding = EncodingFrom(x);
  c.w.encoding = EncodingFrom(w);
  const auto bits_fit = [](const OperandType& type) {
    return type.bits >= 1 && type.bits <= (type.encoding == Encoding::kBipolar ? 1 : 8);
  };
  Require(bits_fit(c.x) && bits_fit(c.w), "bits are 1 to 8, of bipolar codes 1: ", text);
  const int64_t numbers[] = {g.in_channels, c.height, c.width, g.out_channels, kernel, stride, g.group};
  Require(std::all_of(std::begin(numbers), std::end(numbers), [](int64_t n) { return n > 0 && n < 65536; }) &&
              pad >= 0 && pad < 65536 && g.in_channels % g.group == 0 && g.out_channels % g.group == 0,
          "the shape makes no convolution: ", text);
  g.kernel_h = g.kernel_w = kernel;
  g.stride_h = g.stride_w = stride;
  g.pad_top = g.pad_left = g.pad_bottom = g.pad_right = pad;
  return c;
}

// Seeded uniform weights. Sums of products of uniform codes have the deviation that the multiplier is made
// of, so that few outputs saturate.
ConvSpec SpecOf(const Case& c, std::minstd_rand& random) {
  ConvSpec spec;
  spec.geometry = c.geometry;
  spec.x = c.x;
  spec.w = c.w;
  const size_t channels = static_cast<size_t>(c.geometry.out_channels);
  spec.weights.resize(channels * static_cast<size_t>(c.geometry.K()));
  std::uniform_int_distribution<int32_t> code(c.w.MinCode() + (c.narrow ? 1 : 0), c.w.MaxCode());
  for (uint8_t& weight : spec.weights) weight = static_cast<uint8_t>(code(random));
  spec.w_zero_point.assign(channels, 0);
  spec.weight_values = RangeOfWeights(spec);
  std::uniform_int_distribution<int32_t> bias(-1000, 1000);
  for (size_t i = 0; i < channels; ++i) spec.bias.push_back(bias(random));
  const float deviation = std::sqrt(static_cast<float>(c.geometry.K())) * static_cast<float>(1 << c.x.bits) *
                          static_cast<float>(1 << c.w.bits);
  const OperandType y{c.x.bits, Encoding::kUnsigned};
  spec.epilogue.multiplier.assign(channels, 8.0f * static_cast<float>(y.MaxCode()) / deviation);
  spec.epilogue.lo = 0;
  spec.epilogue.hi = y.MaxCode();
  return spec;
}

// Bytes that begin at a cache line, as tensors of ONNX Runtime do.
class Tensor {
 public:
  explicit Tensor(size_t size) : lines_((size + sizeof(Line) - 1) / sizeof(Line)), size_(size) {}
  uint8_t* begin() { return lines_.data()->bytes; }
  uint8_t* end() { return begin() + size_; }

 private:
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::vector<Line> lines_;
  size_t size_;
};

void RunCase(const Case& c, Isa isa, bool check, long region) {
  std::minstd_rand random(1);
  const ConvSpec spec = SpecOf(c, random);
  const ConvShape shape = InferConvShape(spec.geometry, 1, c.height, c.width);
  Tensor x(static_cast<size_t>(c.geometry.in_channels * c.height * c.width));
  Tensor y(static_cast<size_t>(shape.OutPixels() * c.geometry.out_channels));
  std::uniform_int_distribution<int32_t> code(c.x.MinCode(), c.x.MaxCode());
  for (uint8_t& byte : x) byte = static_cast<uint8_t>(code(random));

  const KernelChoice choice = SelectConvKernel(spec, shape, isa, c.row == "auto" ? "" : c.row);
  const auto kernel = choice.row->create(spec);
  InlineThreadPool pool;
  const ConvArgs args{shape, x.begin(), nullptr, y.begin()};
  kernel->Run(args, pool);
  Mark(2 * region);
  kernel->Run(args, pool);
  Mark(2 * region + 1);

  if (check) {
    Tensor expected(static_cast<size_t>(y.end() - y.begin()));
    SelectConvKernel(spec, shape, isa, "conv_reference")
        .row->create(spec)
        ->Run({shape, x.begin(), nullptr, expected.begin()}, pool);
    Require(std::equal(y.begin(), y.end(), expected.begin()), choice.row->name,
            " differs from the reference kernel");
  }
  std::printf(
      "{\"isa\": \"%s\", \"row\": \"%s\", \"expected_cycles\": %.0f, \"packed_bytes\": %zu, "
      "\"scratch_bytes\": %zu}\n",
      IsaName(isa), choice.row->name, choice.row->cost(spec, shape), kernel->PackedBytes(),
      kernel->WorkspaceBytes(shape));
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  const Isa isa = DefaultIsa();
  bool check = false;
  std::vector<Case> cases;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--check") {
      check = true;
    } else {
      cases.push_back(ParseCase(argument));
    }
  }
  Require(!cases.empty(), "no case");
  long region = 0;
  for (const Case& c : cases) RunCase(c, isa, check, region++);
  return 0;
}

}  // namespace
}  // namespace lowbit

int main(int argc, char** argv) {
  try {
    return lowbit::Main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lowbit_arm_bench: %s\n", error.what());
    return 1;
  }
}
