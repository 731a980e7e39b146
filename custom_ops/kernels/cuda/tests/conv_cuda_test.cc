// Every configuration of every GPU kernel against kernels/reference, in every element, on random nodes.
//   lowbit_cuda_test [nodes per class] [seed] [configurations per node] [compute capability] [text] [class]
// A compute capability below the GPU's own (80, 75) tests what smaller GPUs would choose. With a text, only
// configurations that contain it run; with a class, only its nodes. A kernel that does not end within 5
// seconds is named, exit code 3. Outputs are poisoned before each run and followed by guard bytes. Exit code
// 1 when an element differs.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/epilogue.h"
#include "core/float_precision.h"
#include "core/status.h"
#include "kernels/cuda/conv/conv_row.h"
#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/conv/image.h"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/conv/tiles.h"
#include "kernels/cuda/device/memory.h"
#include "kernels/cuda/fused/affine_conv.h"
#include "kernels/cuda/fused/bit_blocks.h"
#include "kernels/cuda/fused/bit_pair.h"
#include "kernels/cuda/fused/chain.h"
#include "kernels/cuda/fused/quantized_conv.h"
#include "kernels/cuda/fused/residual_pair.h"
#include "kernels/cuda/fused/stem_pool.h"
#include "kernels/cuda/nodes/cuda_node.h"
#include "kernels/cuda/tests/draws.h"
#include "kernels/cuda/tests/host_planes.h"
#include "kernels/reference/conv_reference.h"

namespace {

using namespace lowbit;

using cuda::Check;

class Threads final : public ThreadPool {
 public:
  void ParallelFor(size_t count, const std::function<void(size_t)>& fn) override {
    std::atomic<size_t> next{0};
    const auto work = [&] {
      for (size_t i = next++; i < count; i = next++) fn(i);
    };
    std::vector<std::thread> helpers;
    const size_t workers = std::min<size_t>(count, std::max(1u, std::thread::hardware_concurrency()));
    for (size_t i = 1; i < workers; ++i) helpers.emplace_back(work);
    work();
    for (auto& helper : helpers) helper.join();
  }
};

struct Node {
  ConvSpec spec;
  ConvShape shape;
  std::string kind;
};

// A convolution whose residuals another one makes.
struct ResidualPairCase {
  ConvSpec first, second;
  cuda::ResidualPairShapes shapes;
};

// In which planes a pair of few bits is read and made.
TensorPlanes PlanesOf(const ResidualPairCase& pair) {
  const int bits = pair.first.x.bits;
  return {bits, bits, bits};
}

// Residual blocks in a row, three convolutions each.
struct BitBlocksCase {
  std::vector<std::array<ConvSpec, 3>> specs;
  ConvShape shape;

  cuda::BitBlocks Packed(const cuda::Device& device) const {
    cuda::BitBlocks blocks{{}, shape};
    for (const auto& block : specs) {
      blocks.convs.push_back({cuda::PackConv(block[0], device), cuda::PackConv(block[1], device),
                              cuda::PackConv(block[2], device)});
    }
    return blocks;
  }
};

// A function of codes and the convolution that reads what it makes; a Concat in front of both, of tensors of so many
// channels, or none.
struct AffineConvCase {
  AffineSpec affine;
  Node conv;
  ConcatNode concat;
  std::vector<int64_t> joined;
};

// A network's first convolution and the pooling behind it.
struct PooledNode {
  Node conv;
  Window window;
  int64_t pooled_h = 0, pooled_w = 0;
};

// A product of one pixel an image, a table of its codes or none, and the multiplication of an image's
// channels by what they make, as a squeeze-and-excitation ends.
struct GatedCase {
  MatmulNode product;
  std::optional<LookupNode> lookup;
  BinaryNode multiply;
  bool made_first = false;
  int64_t batch = 1, height = 1, width = 1;

  const LookupNode* Table() const { return lookup ? &*lookup : nullptr; }
};

// Two in a row; the residuals of the first may be made by a third one, or its input by one with windows.
struct Chain {
  Node first, second;
  std::optional<Node> residuals, windows = std::nullopt;
};

class Generator : public cuda::Draws {
 public:
  using Draws::Draws;

  OperandType Type(bool bipolar_too) {
    OperandType type;
    type.encoding = bipolar_too && Coin(0.2) ? Encoding::kBipolar
                    : Coin()                 ? Encoding::kSigned
                                             : Encoding::kUnsigned;
    type.bits = type.encoding == Encoding::kBipolar ? 1 : static_cast<int>(Coin(0.5) ? 8 : Int(1, 8));
    return type;
  }

  // One in twenty is the least or the largest. One word for each: tests draw millions.
  int32_t Code(const OperandType& type) {
    const auto word = static_cast<uint32_t>(random_());
    const int32_t least = type.MinCode(), largest = type.MaxCode();
    if ((word & 0xFFu) < kRare) return (word & 0x100u) != 0 ? least : largest;
    const uint32_t below = (word >> 16) * static_cast<uint32_t>(largest - least + 1);
    return least + static_cast<int32_t>(below >> 16);
  }

  std::vector<uint8_t> Codes(const OperandType& type, int64_t count) {
    std::vector<uint8_t> out(static_cast<size_t>(count));
    for (auto& c : out) c = static_cast<uint8_t>(Code(type));
    return out;
  }

  // Shapes by kind of edge.
  Node Make(const std::string& kind) {
    Node node;
    node.kind = kind;
    ConvGeometry& g = node.spec.geometry;
    ConvShape& s = node.shape;
    s = {Int(1, 3), Int(3, 20), Int(3, 20), 0, 0};
    g.in_channels = 16 * Int(1, 12);
    g.out_channels = 16 * Int(1, 12);
    if (kind == "pointwise" || kind == "many pixels") {
      if (kind == "many pixels") s = {Int(1, 3), Int(60, 130), Int(60, 130), 0, 0};
      g.stride_h = g.stride_w = Int(1, 2);
    } else if (kind == "gemm") {
      s = {Int(1, 150), 1, 1, 0, 0};
      g.in_channels = Int(1, 700);
      g.out_channels = Int(1, 300);
    } else if (kind == "few rows") {
      s = {Int(1, 18), 1, 1, 0, 0};
      g.in_channels = 16 * Int(1, 300);
      g.out_channels = Int(1, 300);
    } else {
      g.kernel_h = Int(1, 4);
      g.kernel_w = Int(1, 4);
      g.stride_h = Int(1, 3);
      g.stride_w = Int(1, 3);
      g.dilation_h = Coin(0.8) ? 1 : Int(2, 3);
      g.dilation_w = Coin(0.8) ? 1 : Int(2, 3);
      g.pad_top = Int(0, 3);
      g.pad_left = Int(0, 3);
      g.pad_bottom = Int(0, 3);
      g.pad_right = Int(0, 3);
    }
    if (kind == "deep") {  // long K, few outputs: splits
      s = {1, Int(1, 7), Int(1, 7), 0, 0};
      g.in_channels = 64 * Int(4, 12);
      g.kernel_h = g.kernel_w = 3;
      g.stride_h = g.stride_w = g.dilation_h = g.dilation_w = 1;
      g.pad_top = g.pad_left = g.pad_bottom = g.pad_right = 1;
      if (Coin(0.2)) g.out_channels = 16 * Int(13, 16);  // two of the largest tiles, which share pixels
    }
    if (kind == "flat bits") {
      s = {Int(1, 200), 1, 1, 0, 0};
      if (Coin(0.3)) s = {Int(1, 4), Int(1, 11), Int(1, 11), 0, 0};
      g.in_channels = Coin() ? 16 * Int(1, 100) : Int(1, 1000);
      g.out_channels = Coin() ? 16 * Int(1, 20) : Int(1, 300);
      g.kernel_h = g.kernel_w = g.stride_h = g.stride_w = g.dilation_h = g.dilation_w = 1;
      g.pad_top = g.pad_left = g.pad_bottom = g.pad_right = 0;
    }
    const bool has_few_bits = kind == "bits" || kind == "planes";
    if (kind == "windows" || has_few_bits) {  // mostly of stride 1, over whole runs of channels
      s = {Int(1, 4), Int(3, 20), Coin(0.8) ? Int(3, 20) : Int(100, 260), 0, 0};
      g.in_channels = 64 * Int(1, 5);
      g.stride_h = g.stride_w = 1;
      if (Coin()) g.pad_top = g.pad_left = g.pad_bottom = g.pad_right = 1;
    }
    if (kind == "planes") {
      g.out_channels = 64 * Int(1, 5);
      if (Coin(0.4)) {
        g.stride_h = Int(1, 4);
        g.stride_w = Int(1, 3);
      }
    }
    if (has_few_bits && Coin(0.3)) {  // pixels in a row
      g.kernel_h = g.kernel_w = 1;
      g.pad_top = g.pad_left = g.pad_bottom = g.pad_right = 0;
    }
    if (has_few_bits && Coin(0.2)) {  // whose patches have more slabs than there are slots
      s = {1, Int(3, 16), Int(3, 16), 0, 0};
      g.in_channels = 128 * Int(4, 8);
    }
    if (kind == "bipolar") {  // under padding, along which no code is zero
      g.in_channels = Coin() ? 64 * Int(1, 4) : Int(16, 80);
      g.stride_h = g.stride_w = Coin(0.7) ? 1 : Int(2, 3);
      if (Coin()) {
        g.kernel_h = g.kernel_w = Of({3, 5});
        g.dilation_h = g.dilation_w = 1;
        g.pad_top = g.pad_left = g.pad_bottom = g.pad_right = g.kernel_h / 2;
      }
    }
    if (kind == "channels") {  // odd channel counts
      g.in_channels = Int(1, 70);
      g.out_channels = Int(1, 70);
    }
    if (kind == "group") {
      g.group = Int(2, 4);
      g.in_channels = g.group * (Coin() ? 16 * Int(1, 4) : Int(1, 40));
      g.out_channels = g.group * (Coin() ? 16 * Int(1, 4) : Int(1, 40));
    }
    if (kind == "depthwise") {
      g.group = g.in_channels = g.out_channels = Coin() ? 16 * Int(1, 8) : Int(2, 90);
      if (Coin()) g.kernel_h = g.kernel_w = Of({3, 5});
    }
    if (kind == "stem") {
      s = {Int(1, 2), Int(20, 50), Coin(0.7) ? 4 * Int(5, 13) : Int(20, 50), 0, 0};
      g.in_channels = Of({1, 2, 3, 3, 3, 4});
      g.dilation_h = g.dilation_w = 1;
      if (Coin()) {  // as networks have it; else any window and pads
        g.kernel_h = g.kernel_w = Of({3, 7});
        g.stride_h = g.stride_w = Int(1, 2);
        g.pad_top = g.pad_left = g.pad_bottom = g.pad_right = g.kernel_h / 2;
      } else {
        g.kernel_h = Int(1, 9);
        g.kernel_w = Int(1, 8);
      }
    }
    if (kind == "transposed") {
      g.transposed = true;
      g.in_channels = Int(1, 40);
      g.out_channels = Int(1, 40);
      g.dilation_h = g.dilation_w = 1;
    }
    const auto out = [&](int64_t in, int64_t kernel, int64_t stride, int64_t dilation, int64_t& before,
                         int64_t& after) {
      if (g.transposed) {
        before = std::min(before, kernel - 1);
        after = std::min(after, kernel - 1);
        if ((in - 1) * stride + kernel - before - after < 1) before = after = 0;
        return (in - 1) * stride + kernel - before - after;
      }
      const int64_t reach = (kernel - 1) * dilation + 1;
      if (in + before + after < reach) after = reach - in - before;
      return (in + before + after - reach) / stride + 1;
    };
    s.out_h = out(s.in_h, g.kernel_h, g.stride_h, g.dilation_h, g.pad_top, g.pad_bottom);
    s.out_w = out(s.in_w, g.kernel_w, g.stride_w, g.dilation_w, g.pad_left, g.pad_right);
    do {
      Types(node.spec);
    } while (has_few_bits && !HasFewBits(node.spec));  // before its many weights are drawn
    if (kind == "flat bits") {
      const auto of_bits = [&](int64_t most) -> OperandType {
        if (Coin(0.3)) return {1, Encoding::kBipolar};
        return {static_cast<int>(Int(1, most)), Coin() ? Encoding::kSigned : Encoding::kUnsigned};
      };
      node.spec.x = of_bits(4);
      node.spec.w = of_bits(2);
    }
    Values(node.spec);
    if (kind == "flat bits" && Coin(0.8))
      node.spec.w_zero_point.assign(node.spec.w_zero_point.size(), node.spec.w_zero_point.front());
    // One draw in some twenty is; under some pads none may be, whatever is drawn.
    for (int i = 0; kind == "bipolar" && i < 200 && !IsBipolar(node.spec); ++i) Operands(node.spec);
    if (kind == "planes" && Coin(0.7)) {  // which are rare among the others
      ConvSpec& spec = node.spec;
      spec.x = {static_cast<int>(Int(1, 2)), Encoding::kUnsigned};
      spec.x_zero_point = Code(spec.x);
      spec.w = WeightsOf(spec.x.bits);
      spec.weights = Codes(spec.w, g.out_channels * g.K());
      spec.w_zero_point.assign(spec.w_zero_point.size(), 0);
    }
    const bool adds = kind == "planes" && Coin(0.4);
    do {
      node.spec.epilogue = {};
      MakeEpilogue(node.spec);
    } while (kind == "planes" &&
             (!BecomesFewCodes(node.spec.epilogue) || (adds && !node.spec.epilogue.has_residual)));
    if ((kind == "windows" || has_few_bits || kind == "deep") && Coin()) node.spec.x_zero_point = 0;
    return node;
  }

  // Two convolutions of as many outputs: 1x1 ones, or windows over whole tiles of channels.
  ResidualPairCase MakeResidualPair() {
    ResidualPairCase pair;
    const int64_t batch = Int(1, 3), out_channels = 16 * Int(1, 20);
    const int64_t out_h = Coin(0.2) ? Int(40, 90) : Int(1, 20), out_w = Coin(0.2) ? Int(40, 90) : Int(1, 20);
    const EpilogueKind kind = Of({EpilogueKind::kTail, EpilogueKind::kRequantize, EpilogueKind::kRequantize,
                                  EpilogueKind::kThresholds});
    for (const bool is_second : {false, true}) {
      ConvSpec& spec = is_second ? pair.second : pair.first;
      ConvShape& s = is_second ? pair.shapes.second : pair.shapes.first;
      ConvGeometry& g = spec.geometry;
      g.in_channels = 16 * Int(1, 20);
      g.out_channels = out_channels;
      g.stride_h = Int(1, 3);
      g.stride_w = Coin(0.7) ? g.stride_h : Int(1, 3);
      if (Coin(0.3)) {
        g.in_channels = 128 * Int(1, 2);
        g.kernel_h = Int(1, 3);
        g.kernel_w = Int(1, 3);
        g.dilation_h = Int(1, 2);
        g.dilation_w = Int(1, 2);
        g.pad_top = Int(0, 1);
        g.pad_left = Int(0, 1);
        g.pad_bottom = Int(0, 1);
        g.pad_right = Int(0, 1);
      }
      // As many pixels as the outputs read, and those that a stride leaves over.
      const auto in = [&](int64_t out, int64_t kernel, int64_t stride, int64_t dilation, int64_t before,
                          int64_t& after) {
        const int64_t size =
            (out - 1) * stride + (kernel - 1) * dilation + 1 - before - after + Int(0, stride - 1);
        if (size >= 1) return size;
        after += size - 1;
        return int64_t{1};
      };
      s = {batch, 0, 0, out_h, out_w};
      s.in_h = in(out_h, g.kernel_h, g.stride_h, g.dilation_h, g.pad_top, g.pad_bottom);
      s.in_w = in(out_w, g.kernel_w, g.stride_w, g.dilation_w, g.pad_left, g.pad_right);
      if (g.pad_bottom < 0 || g.pad_right < 0) return MakeResidualPair();
      do {
        Operands(spec);  // of tails mostly codes of one sign, which the kernel takes
      } while (spec.x.encoding == Encoding::kBipolar ||
               (kind != EpilogueKind::kRequantize && is_second && spec.x.encoding != pair.first.x.encoding &&
                Coin(0.9)));
      if (Coin(0.8)) spec.w_zero_point.assign(spec.w_zero_point.size(), 0);
      if (g.pad_top + g.pad_left + g.pad_bottom + g.pad_right > 0 && Coin(0.8)) spec.x_zero_point = 0;
      do {
        spec.epilogue = {};
        MakeEpilogue(spec);
      } while (spec.epilogue.kind != kind || !cuda::MayRoundFours(spec.epilogue) ||
               spec.epilogue.has_residual != is_second);
    }
    pair.second.epilogue.residual_signed = pair.first.epilogue.y_signed;
    pair.second.epilogue.residual_zero_point = pair.first.epilogue.zero_point;
    return pair;
  }

  // Two 1x1 convolutions of codes of 1 or 2 bits, of which either may have a stride, to codes of as many; mostly such as
  // have a kernel together.
  ResidualPairCase MakeBitPair(const cuda::Device& device) {
    ResidualPairCase pair = DrawBitPair();
    const auto is_one = [&] {
      const auto configs =
          cuda::BitPairConfigs({cuda::PackConv(pair.first, device), cuda::PackConv(pair.second, device)},
                               pair.shapes, PlanesOf(pair));
      return configs.size() > 1;
    };
    for (int i = 0; i < 40 && !is_one(); ++i) pair = DrawBitPair();
    return pair;
  }
  ResidualPairCase DrawBitPair() {
    ResidualPairCase pair;
    const int64_t batch = Int(1, 4), out_channels = 64 * Int(1, 5);
    const int64_t out_h = Int(1, 20), out_w = Coin(0.8) ? Int(1, 20) : Int(60, 140);
    const bool has_strides = Coin(0.7);
    const int bits = Coin() ? 1 : 2;
    for (const bool is_second : {false, true}) {
      ConvSpec& spec = is_second ? pair.second : pair.first;
      ConvGeometry& g = spec.geometry;
      g.in_channels = 64 * Int(1, 5);
      g.out_channels = out_channels;
      if (has_strides && Coin(is_second ? 0.2 : 0.9)) {
        g.stride_h = Int(1, 3);
        g.stride_w = Int(1, 3);
      }
      (is_second ? pair.shapes.second : pair.shapes.first) =
          ConvShape{batch, (out_h - 1) * g.stride_h + 1 + Int(0, g.stride_h - 1),
                    (out_w - 1) * g.stride_w + 1 + Int(0, g.stride_w - 1), out_h, out_w};
      Types(spec);
      Values(spec);
      FewBits(spec, bits, true);
      do {
        spec.epilogue = {};
        MakeEpilogue(spec);
      } while (spec.epilogue.has_residual != is_second || !BecomesFewCodes(spec.epilogue) ||
               spec.epilogue.y_hi >> bits != 0);
    }
    pair.second.epilogue.residual_signed = false;
    pair.second.epilogue.residual_zero_point = pair.first.epilogue.zero_point;
    return pair;
  }

  // Such as have a kernel together.
  BitBlocksCase MakeBitBlocks(const cuda::Device& device) {
    BitBlocksCase blocks;
    const int64_t in_h = Int(1, 18), in_w = Int(1, 18), between = 64 * Of({1, 1, 2, 2, 3, 4}),
                  wide = 128 * Of({1, 2, 2, 4});
    blocks.shape = {Int(1, 3), in_h, in_w, in_h, in_w};
    const int bits = Coin() ? 1 : 2;
    const auto draw = [&] {
      std::array<ConvSpec, 3> block;
      for (size_t i = 0; i < block.size(); ++i) {
        ConvSpec& spec = block[i];
        ConvGeometry& g = spec.geometry;
        g.in_channels = i == 0 ? wide : between;
        g.out_channels = i == 2 ? wide : between;
        if (i == 1) {
          g.kernel_h = g.kernel_w = 3;
          g.pad_top = g.pad_left = g.pad_bottom = g.pad_right = 1;
        }
        Types(spec);
        Values(spec);
        for (int32_t& bias : spec.bias) bias %= 32;  // else most codes are the highest or the lowest
        FewBits(spec, bits, i != 1);
        do {
          spec.epilogue = {};
          MakeEpilogue(spec);
        } while (spec.epilogue.has_residual != (i == 2) || !BecomesFewCodes(spec.epilogue) ||
                 (i == 2 ? spec.epilogue.y_hi : spec.epilogue.hi) >> bits != 0 ||
                 (i < 2 && spec.epilogue.lo != 0));
      }
      block[2].epilogue.residual_signed = false;
      return block;
    };
    for (int64_t count = Int(1, 3); count > 0; --count) {
      BitBlocksCase one{{draw()}, blocks.shape};
      for (int i = 0; i < 40 && cuda::BitBlocksConfigs(one.Packed(device)).empty(); ++i) one.specs = {draw()};
      blocks.specs.push_back(std::move(one.specs[0]));
    }
    return blocks;
  }

  // Unsigned codes of so many bits, and weights of no more.
  void FewBits(ConvSpec& spec, int bits, bool has_zero_point) {
    const ConvGeometry& g = spec.geometry;
    spec.x = {bits, Encoding::kUnsigned};
    spec.x_zero_point = has_zero_point ? Code(spec.x) : 0;
    spec.w = WeightsOf(bits);
    spec.weights = Codes(spec.w, g.out_channels * g.K());
    spec.w_zero_point.assign(static_cast<size_t>(g.out_channels), 0);
  }

  // Of no more bits than codes have.
  OperandType WeightsOf(int most_bits) {
    const int bits = static_cast<int>(Int(1, most_bits));
    return {bits, bits > 1 || Coin() ? Encoding::kSigned : Encoding::kBipolar};
  }

  // Windows of 3x3 and stride 2 over what a stem of stride 2 makes, of any parity and padding. The last ones
  // may reach beyond the image.
  PooledNode MakePooled() {
    PooledNode pooled;
    Node& node = pooled.conv;
    do {
      node = Make("stem");
    } while (node.spec.x.encoding == Encoding::kBipolar);
    ConvSpec& spec = node.spec;
    ConvGeometry& g = spec.geometry;
    ConvShape& s = node.shape;
    node.kind = "pooled";
    s.batch = Int(1, 3);
    s.in_h = Coin(0.2) ? Int(1, 12) : Int(12, 90);
    s.in_w = Coin(0.2) ? Int(1, 12) : Coin() ? 2 * Int(10, 70) : Int(20, 140);
    g.stride_h = g.stride_w = 2;
    g.out_channels = Coin() ? 64 * Int(1, 3) : 16 * Int(1, 9);
    g.kernel_h = Coin() ? 7 : Int(1, 7);
    g.kernel_w = Coin() ? 7 : Int(1, 7);
    for (int64_t* const pad : {&g.pad_top, &g.pad_left, &g.pad_bottom, &g.pad_right}) *pad = Int(0, 3);
    if (g.pad_top % 2 == 0 && Coin(0.2)) g.kernel_h = 8;
    if (g.pad_left % 2 == 0 && Coin(0.2)) g.kernel_w = 8;
    const auto out = [](int64_t in, int64_t kernel, int64_t before, int64_t& after) {
      after = std::max(after, kernel - in - before);
      return (in + before + after - kernel) / 2 + 1;
    };
    s.out_h = out(s.in_h, g.kernel_h, g.pad_top, g.pad_bottom);
    s.out_w = out(s.in_w, g.kernel_w, g.pad_left, g.pad_right);
    do {
      ConvSpec fresh;
      fresh.geometry = g;
      spec = std::move(fresh);
      Operands(spec);
    } while (spec.x.encoding == Encoding::kBipolar);
    if (Coin(0.9)) spec.w_zero_point.assign(spec.w_zero_point.size(), 0);
    RequantizesFor(spec, [](const Epilogue& e) { return !e.has_residual; });
    if (Coin(0.4)) {  // which may leave as planes
      BecomesFewCodes(spec.epilogue);
    }
    pooled.window.kernel = {1, 3, 3};
    pooled.window.stride = {1, 2, 2};
    for (const size_t d : {1, 2}) pooled.window.pad_begin[d] = Int(0, 1);
    const auto windows = [&](int64_t in, int64_t pad) {
      return Int(1, std::max<int64_t>(1, (in + pad + 1) / 2));
    };
    pooled.pooled_h = windows(s.out_h, pooled.window.pad_begin[1]);
    pooled.pooled_w = windows(s.out_w, pooled.window.pad_begin[2]);
    return pooled;
  }

  // 1x1 convolutions, the second of which reads what the first makes.
  Chain MakeChain() {
    Chain chain;
    Node &first = chain.first, &second = chain.second;
    first.kind = second.kind = "chain";
    const int64_t height = Int(1, 40), width = Int(1, 40);
    first.shape = second.shape = {Int(1, 4), height, width, height, width};
    ConvGeometry &a = first.spec.geometry, &b = second.spec.geometry;
    a.in_channels = 16 * Int(1, 20);
    a.out_channels = b.in_channels = Coin() ? 64 * Int(1, 16) : 16 * Int(1, 40);
    b.out_channels = 16 * Int(1, 20);
    const bool makes_residuals = Coin();
    if (makes_residuals) {
      Node& residuals = chain.residuals.emplace(first);
      residuals.spec.geometry.in_channels = 16 * Int(1, 20);
      residuals.kind = "chained pair";
      for (Node* const node : {&first, &residuals}) Stride(*node);
      ChainOperands(residuals.spec);
      RequantizesFor(residuals.spec, [&](const Epilogue& e) { return !e.has_residual; });
    }
    do {
      ChainOperands(first.spec);
      // Both of a pair read codes of one sign.
    } while (makes_residuals && first.spec.x.encoding != chain.residuals->spec.x.encoding);
    ChainOperands(second.spec);
    second.spec.x.bits = 8;  // whatever the first makes
    // Residuals behind a tail go with a tail.
    const bool adds_tail =
        makes_residuals && chain.residuals->spec.epilogue.kind == EpilogueKind::kTail && Coin(0.9);
    RequantizesFor(first.spec, [&](const Epilogue& e) {
      return (e.has_residual || (!makes_residuals && Coin(0.3))) &&
             (!adds_tail || e.kind == EpilogueKind::kTail);
    });
    RequantizesFor(second.spec, [](const Epilogue& e) { return !e.has_residual; });
    if (makes_residuals) {
      first.spec.epilogue.residual_signed = chain.residuals->spec.epilogue.y_signed;
      first.spec.epilogue.residual_zero_point = chain.residuals->spec.epilogue.zero_point;
    }
    return chain;
  }

  GatedCase MakeGated() {
    GatedCase nodes;
    nodes.batch = Int(1, 4);
    nodes.height = Coin(0.1) ? 1 : Int(1, 20);
    nodes.width = Coin(0.1) ? 1 : Coin(0.1) ? Int(60, 90) : Int(1, 20);
    ConvSpec& spec = nodes.product.conv;
    ConvGeometry& g = spec.geometry;
    g.in_channels = Coin() ? 4 * Int(1, 60) : Int(1, 150);
    g.out_channels = Coin(0.4) ? 16 * Int(1, 20) : Coin(0.7) ? 4 * Int(1, 60) : Int(1, 100);
    do {
      Operands(spec);
      if (Coin(0.8)) spec.w_zero_point.assign(spec.w_zero_point.size(), 0);
      do {
        spec.epilogue = {};
        MakeEpilogue(spec);
      } while (!spec.epilogue.quantized_output || spec.epilogue.has_residual);
      nodes.made_first = Coin();
      nodes.lookup.reset();
      if (Coin())
        nodes.lookup = LookupNode{spec.epilogue.y_signed, Coin(), 1, Codes({8, Encoding::kUnsigned}, 256)};
      BinarySpec& multiply = nodes.multiply.spec;
      multiply = {};
      multiply.kind = BinaryKind::kMul;
      multiply.a_signed = Coin();
      multiply.b_signed = Coin();
      (nodes.made_first ? multiply.a_signed : multiply.b_signed) =
          nodes.lookup ? nodes.lookup->y_signed : spec.epilogue.y_signed;
      const auto zero_point = [&](bool is_signed) {
        return static_cast<int32_t>(is_signed ? Int(-128, 127) : Int(0, 255));
      };
      multiply.a_zero_point = zero_point(multiply.a_signed);
      multiply.b_zero_point = zero_point(multiply.b_signed);
      const bool is_exact = Coin();  // many ties
      for (float* const scale : {&multiply.a_scale, &multiply.b_scale, &multiply.quantizer.scale})
        *scale = is_exact ? std::exp2(static_cast<float>(Int(-7, -1))) : Real(0.002f, 0.1f);
      multiply.quantizer.quantized = true;
      multiply.quantizer.is_signed = Coin();
      Range(multiply.quantizer.is_signed, multiply.quantizer.zero_point, multiply.quantizer.lo,
            multiply.quantizer.hi);
    } while (!cuda::FusesTableSum(nodes.product, nodes.Table(), nodes.multiply, nodes.made_first));
    return nodes;
  }

  // A bottleneck: windows in front of two 1x1 convolutions.
  Chain MakeBottleneck(const cuda::Device& device) {
    using enum cuda::Finish;
    Chain chain;
    Node& windows = chain.windows.emplace();
    windows.kind = "bottleneck";
    windows.shape = {Int(1, 3), 1, 1, Int(1, 24), Of({Int(1, 64), Int(1, 20), int64_t{14}, int64_t{96}})};
    ConvGeometry g;
    g.kernel_h = Of({1, 3, 3, 3, 5});
    g.kernel_w = Of({1, 3, 3, 3, 2});
    if (g.kernel_h * g.kernel_w == 1) g.kernel_w = 3;
    g.dilation_h = Int(1, 2);
    g.dilation_w = Int(1, 2);
    const int64_t reach_h = (g.kernel_h - 1) * g.dilation_h, reach_w = (g.kernel_w - 1) * g.dilation_w;
    g.pad_top = Int(0, reach_h);
    g.pad_bottom = Int(0, reach_h - g.pad_top);
    g.pad_left = Int(0, reach_w);
    g.pad_right = Int(0, reach_w - g.pad_left);
    windows.shape.in_h = std::max<int64_t>(1, windows.shape.out_h + reach_h - g.pad_top - g.pad_bottom);
    windows.shape.in_w = std::max<int64_t>(1, windows.shape.out_w + reach_w - g.pad_left - g.pad_right);
    windows.shape.out_h = windows.shape.in_h + g.pad_top + g.pad_bottom - reach_h;
    windows.shape.out_w = windows.shape.in_w + g.pad_left + g.pad_right - reach_w;
    const ConvShape& s = windows.shape;
    const ConvShape behind = {s.batch, s.out_h, s.out_w, s.out_h, s.out_w};
    const int64_t between = 16 * Int(1, 6), wide = 16 * Int(1, 14);
    const auto [first, second] =
        Of<std::pair<cuda::Finish, cuda::Finish>>({{kFloatsOnLine, kFloatsFromZero},
                                                   {kFloatsInverse, kFloatsFromZero},
                                                   {kFloatsFromZero, kFloatsFromZero},
                                                   {kCappedOnLine, kCappedFromZero},
                                                   {kWordsTailOnLine, kTail},
                                                   {kFloatsAdding, kFloats}});
    const cuda::Finish of_windows =
        second == kFloats ? Of({kFloats, kFloatsFromZero, kCappedFromZero, kTail, kLackingTail}) : second;
    windows.spec = Finishing(of_windows, s, 64 * Of({1, 1, 2}), between, device, false, false, g).spec;
    chain.first = Finishing(first, behind, between, wide, device, false, false, ConvGeometry{});
    chain.second = Finishing(second, behind, wide, 16 * Int(1, 8), device, false, false, ConvGeometry{});
    if (!chain.first.spec.epilogue.has_residual || Coin()) return chain;
    // Another reads what the windows make; the first one reads something else, maybe with a stride.
    const bool is_multiplied = first == kFloatsOnLine || first == kFloatsInverse || first == kCappedOnLine;
    chain.residuals = is_multiplied ? Making(behind, between, wide, device)
                                    : Finishing(Coin() ? kFloatsFromZero : kFloats, behind, between, wide,
                                                device, false, false, ConvGeometry{});
    Stride(chain.first);
    return chain;
  }

  // A normalization, by channel or one for all, and a 1x1 convolution: few pixels and many channels, or the reverse.
  AffineConvCase MakeAffineConv() {
    AffineConvCase nodes;
    Node& conv = nodes.conv;
    conv.kind = "affined";
    const bool is_deep = Coin(0.4);
    const int64_t height = Int(1, is_deep ? 9 : 30), width = Int(1, is_deep ? 9 : 30);
    conv.shape = {Int(1, is_deep ? 1 : 3), height, width, height, width};
    conv.spec.geometry.in_channels = 16 * (is_deep ? Int(8, 72) : Int(1, 20));
    conv.spec.geometry.out_channels = 16 * Int(1, 12);
    ChainOperands(conv.spec);
    conv.spec.x.bits = 8;  // whatever the function makes
    const bool is_plain = Coin(0.9);
    RequantizesFor(conv.spec, [&](const Epilogue& e) {
      return !e.has_residual && (!is_plain || e.kind == EpilogueKind::kRequantize);
    });

    AffineSpec& spec = nodes.affine;
    spec.x_signed = Coin();
    spec.channels = Coin(0.9) ? conv.spec.geometry.in_channels : 1;
    spec.has_affine = Coin(0.9);
    const OperandType& made = conv.spec.x;
    Quantizer& quantizer = spec.quantizer;
    quantizer.is_signed = made.encoding == Encoding::kSigned;
    quantizer.lo = quantizer.is_signed ? -128 : 0;
    quantizer.hi = quantizer.lo + Of({255, 255, 255, 255, 127, 127, 15});
    if (quantizer.hi - quantizer.lo == 127 && Coin()) quantizer.lo += 128, quantizer.hi += 128;
    const float x_scale = Real(0.01f, 0.1f), y_scale = Real(0.01f, 0.1f);
    const auto x_zero = static_cast<int32_t>(spec.x_signed ? Int(-128, 127) : Int(0, 255));
    const bool ties = Coin(0.3);  // then many values are halves
    for (int64_t c = 0; c < spec.channels; ++c) {
      spec.x_scale.push_back(ties ? 0.5f : x_scale);
      spec.x_zero_point.push_back(x_zero);
      spec.y_scale.push_back(ties ? 1.0f : y_scale);
      spec.y_zero_point.push_back(conv.spec.x_zero_point);
      if (!spec.has_affine) continue;
      spec.scale.push_back(ties ? static_cast<float>(Int(-4, 4)) : Real(-2, 2));
      spec.shift.push_back(ties ? 0.5f * static_cast<float>(Int(-200, 200)) : Real(-2, 2));
    }
    const int64_t channels = conv.spec.geometry.in_channels;
    if (channels > 16 && Coin(0.6)) {
      // Two, or as many as a dense block of PyTorch joins.
      const int64_t most = Coin() ? 2 : static_cast<int64_t>(cuda::kMaxJoinedParts);
      int64_t left = channels / 16;
      while (left > 0 && std::ssize(nodes.joined) < most) {
        const bool is_last = std::ssize(nodes.joined) + 1 == most;
        const int64_t blocks =
            is_last ? left : Int(1, std::min(left - (nodes.joined.empty() ? 1 : 0), left / 2 + 1));
        nodes.joined.push_back(16 * blocks);
        left -= blocks;
      }
      Quantizer& y = nodes.concat.quantizer;
      y = quantizer;
      y.is_signed = spec.x_signed;
      y.lo = y.is_signed ? -128 : 0;
      y.hi = y.lo + 255;
      y.zero_point = x_zero;
      y.scale = x_scale;
      nodes.concat.axis = Coin() ? 3 : -1;
      for (size_t i = 0; i < nodes.joined.size(); ++i) {
        ConcatNode::Part& part = nodes.concat.parts.emplace_back();
        part.copied = Coin(0.3);
        part.spec.x_signed = part.copied ? y.is_signed : Coin();
        part.spec.x_zero_point = {static_cast<int32_t>(part.copied          ? x_zero
                                                       : part.spec.x_signed ? Int(-128, 127)
                                                                            : Int(0, 255))};
        part.spec.x_scale = {part.copied ? y.scale : ties ? 0.5f * y.scale : Real(0.01f, 0.1f)};
      }
    }
    return nodes;
  }

  // Of codes' numbers or of any, and residuals, or their products; many of the sums are ties.
  cuda::ResidualSum Sum() {
    cuda::ResidualSum sum;
    sum.multiplies = Coin();
    const bool is_exact = Coin();
    const auto scale = [&] {
      return is_exact ? static_cast<float>(Int(10, 99)) / 1280.0f : Real(0.01f, 0.1f);
    };
    for (cuda::CodeGrid* const grid : {&sum.residuals, &sum.y}) {
      *grid = {Coin(), scale(), 0};
      Range(grid->is_signed, grid->zero_point, sum.lo, sum.hi);  // y's are last
    }
    const float of_codes = scale();
    for (int i = 0; i < 256; ++i)
      sum.values.push_back(is_exact ? static_cast<float>(Int(-128, 127)) * of_codes : Real(-10.0f, 10.0f));
    return sum;
  }

  // Of so many images and channels, whose sums a kernel for one finish finishes so: windows that most families
  // take, or those of `of`. is_binary: as binary networks have it, so that windows have borders; is_signed: of
  // inputs with signs.
  Node Finishing(cuda::Finish finish, ConvShape shape, int64_t in_channels, int64_t out_channels,
                 const cuda::Device& device, bool is_binary = false, bool is_signed = false,
                 const std::optional<ConvGeometry>& of = std::nullopt) {
    constexpr int kMostDraws = 100000;
    Node node;
    node.kind = "finish " + std::to_string(static_cast<int>(finish));
    node.shape = shape;
    for (int draw = 0; draw < kMostDraws; ++draw) {
      node.spec = {};
      ConvGeometry& g = node.spec.geometry;
      const bool has_windows = of ? of->Taps() > 1 : in_channels % 128 == 0;
      g.kernel_h = g.kernel_w = has_windows ? 3 : 1;
      g.pad_top = g.pad_left = g.pad_bottom = g.pad_right = has_windows ? 1 : 0;
      if (of) g = *of;
      g.in_channels = in_channels;
      g.out_channels = out_channels;
      Operands(node.spec);
      const bool may_be_signed = is_signed || finish == cuda::Finish::kIntegersInTail;
      const Encoding x = node.spec.x.encoding;
      if (is_binary ? !IsBipolar(node.spec)
                    : x == Encoding::kBipolar || (x == Encoding::kSigned ? !may_be_signed : is_signed)) {
        continue;
      }
      if (!is_binary) node.spec.x.bits = 8;  // whatever other nodes make
      if (has_windows) node.spec.x_zero_point = 0;
      node.spec.w_zero_point.assign(node.spec.w_zero_point.size(), 0);
      MakeEpilogue(node.spec);
      if (finish == cuda::Finish::kLackingTail || finish == cuda::Finish::kCappedLackingOnLine)
        LoseLines(node.spec.epilogue);
      if (!cuda::MayRoundFours(node.spec.epilogue)) continue;
      const cuda::PackedConv packed(node.spec, device, {});
      cuda::ConvConfig config{&cuda::kWgmmaRow, 64, 32, 1};
      config.boxes = is_signed;  // which have floats of such inputs
      if (packed.Problem(shape).requantizes &&
          cuda::FinishOf(packed.Params(shape, config).epilogue) == finish) {
        return node;
      }
    }
    Fail("no node of ", kMostDraws, " has ", node.kind);
  }

  // What makes residuals for floats: it is multiplied alone, to any codes.
  Node Making(const ConvShape& shape, int64_t in_channels, int64_t out_channels, const cuda::Device& device) {
    const cuda::ConvConfig config{&cuda::kWgmmaRow, 64, 32, 1};
    const auto fits = [&](const Node& node) {
      return cuda::AreWordsMultiplied(cuda::PackedConv(node.spec, device, {}).Params(shape, config).epilogue);
    };
    Node node;
    do {
      node = Finishing(cuda::Finish::kFloats, shape, in_channels, out_channels, device, false, false,
                       ConvGeometry{});
    } while (!fits(node));
    return node;
  }

 private:
  static bool HasFewBits(const ConvSpec& spec) {
    return spec.x.encoding != Encoding::kSigned && spec.x.bits <= 2 && spec.w.bits <= 2;
  }

  // Gives some channels of a float tail steps that come near a tie each, so that roundings decide and no line has them.
  // Some beside them have sums of far more steps than there are codes.
  void LoseLines(Epilogue& e) {
    if (e.kind != EpilogueKind::kTail) return;
    const float scale = e.adds_behind_tail ? e.inner_scale : e.y_scale;
    for (size_t c = 0; c < e.acc_scale.size(); ++c) {
      if (c > 0 && Coin()) continue;
      e.acc_scale[c] = scale * (c > 0 && Coin(0.3) ? 16.0f : 0x1p-7f);
      if (c < e.tail_bias.size()) e.tail_bias[c] = scale * 0x1p-7f * static_cast<float>(Int(-64, 64));
    }
  }

  // Gives codes of an epilogue 1 or 2 bits, where it has some that may have as many.
  bool BecomesFewCodes(Epilogue& e) {
    const bool has_thresholds = e.kind == EpilogueKind::kThresholds;
    if (!e.quantized_output || (has_thresholds && (e.threshold_count > 3 || e.has_residual))) return false;
    if (has_thresholds) std::fill(e.base.begin(), e.base.end(), 0);
    e.y_signed = false;
    e.y_lo = e.y_zero_point = 0;
    e.y_hi = Coin() ? 1 : 3;
    if (e.kind == EpilogueKind::kRequantize && !e.has_residual) {
      e.lo = e.zero_point = 0;
      e.hi = e.y_hi;
    }
    if (e.has_residual && Coin(0.8)) {  // of as few, as are those that they are added to
      e.residual_signed = false;
      e.residual_zero_point = static_cast<int32_t>(Int(0, 1));
      for (float* const scale : {&e.inner_scale, &e.residual_scale, &e.y_scale}) *scale = Real(0.3f, 1.5f);
      e.lo = static_cast<int32_t>(Int(-2, 1));
      e.hi = e.lo + Of({1, 1, 2, 3});
      e.zero_point = static_cast<int32_t>(Int(e.lo, e.hi));
    }
    return true;
  }

  // As binary networks have it: no zero points, and weights that may be doubled.
  static bool IsBipolar(const ConvSpec& spec) {
    return spec.x.encoding == Encoding::kBipolar && cuda::OfBits(spec);
  }

  // As many outputs of a larger image, and pixels that a stride leaves over.
  void Stride(Node& node) {
    ConvGeometry& g = node.spec.geometry;
    g.stride_h = Int(1, 3);
    g.stride_w = Coin(0.7) ? g.stride_h : Int(1, 3);
    node.shape.in_h = (node.shape.out_h - 1) * g.stride_h + Int(1, g.stride_h);
    node.shape.in_w = (node.shape.out_w - 1) * g.stride_w + Int(1, g.stride_w);
  }

  // Mostly what the kernels of chains take.
  void ChainOperands(ConvSpec& spec) {
    do {
      Operands(spec);
    } while (spec.x.encoding == Encoding::kBipolar);
    if (Coin(0.9)) spec.w_zero_point.assign(spec.w_zero_point.size(), 0);
  }

  template <typename Accepts>
  void RequantizesFor(ConvSpec& spec, const Accepts& accepts) {
    do {
      spec.epilogue = {};
      MakeEpilogue(spec);
    } while (!cuda::MayRoundFours(spec.epilogue) || !accepts(spec.epilogue));
  }

  void Types(ConvSpec& spec) {
    spec.x = Type(true);
    spec.w = Type(true);
  }

  void Operands(ConvSpec& spec) {
    Types(spec);
    Values(spec);
  }

  // Of the types that it has.
  void Values(ConvSpec& spec) {
    const ConvGeometry& g = spec.geometry;
    spec.x_zero_point = spec.x.encoding != Encoding::kBipolar && Coin(0.6) ? Code(spec.x) : 0;
    spec.weights = Codes(spec.w, g.out_channels * g.K());
    spec.w_zero_point.clear();  // drawn again where these do not fit
    spec.bias.clear();
    const int64_t mode = Int(0, 3);
    const bool extreme = Coin(0.2);  // sums as large as they get
    for (int64_t c = 0; c < g.out_channels; ++c) {
      int32_t zero = 0;
      if (spec.w.encoding != Encoding::kBipolar) {
        if (mode == 0) zero = Code(spec.w);
        if (mode == 1) zero = (spec.w.MinCode() + spec.w.MaxCode() + 1) / 2;
      }
      spec.w_zero_point.push_back(zero);
      if (extreme && Coin()) {
        std::fill_n(spec.weights.begin() + c * g.K(), g.K(),
                    static_cast<uint8_t>(Coin() ? spec.w.MaxCode() : spec.w.MinCode()));
      }
      spec.bias.push_back(static_cast<int32_t>(Coin(0.8) ? Int(-5000, 5000) : 0));
    }
  }

  void Range(bool is_signed, int32_t& zero, int32_t& lo, int32_t& hi) {
    const OperandType type{static_cast<int>(Coin(0.7)   ? 8
                                            : Coin(0.3) ? 7
                                                        : Int(1, 8)),
                           is_signed ? Encoding::kSigned : Encoding::kUnsigned};
    zero = static_cast<int32_t>(Int(type.MinCode(), type.MaxCode()));
    if (Coin(0.2)) zero = (type.MinCode() + type.MaxCode() + 1) / 2;  // the middle, as of symmetric codes
    if (Coin(0.2)) zero = type.MinCode();                             // as after ReLU
    lo = Coin(0.3) ? zero : type.MinCode();
    hi = type.MaxCode();
  }

  void MakeEpilogue(ConvSpec& spec) {
    Epilogue& e = spec.epilogue;
    const size_t channels = static_cast<size_t>(spec.geometry.out_channels);
    const float spread = std::sqrt(static_cast<float>(spec.geometry.K())) *
                         static_cast<float>((1 << spec.x.bits) * (1 << spec.w.bits)) / 6.0f;
    const auto scales = [&](float size) {
      std::vector<float> out(channels);
      // Powers of two make ties.
      const float exact = std::exp2(std::round(std::log2(size)));
      const bool ties = Coin(0.3);
      for (auto& v : out) v = ties ? exact : size * Real(0.5f, 1.5f);
      return out;
    };
    e.kind = Of({EpilogueKind::kRequantize, EpilogueKind::kRequantize, EpilogueKind::kFloat,
                 EpilogueKind::kThresholds, EpilogueKind::kTail, EpilogueKind::kTail});
    e.residual_signed = Coin();
    e.residual_scale = Real(0.01f, 0.1f);
    e.residual_zero_point =
        (e.residual_signed ? -128 : 0) + static_cast<int32_t>(Coin(0.3) ? 0 : Int(0, 255));
    e.y_signed = Coin();
    Range(e.y_signed, e.y_zero_point, e.y_lo, e.y_hi);
    switch (e.kind) {
      case EpilogueKind::kRequantize:
        e.has_residual = Coin(0.4);
        e.multiplier = scales(60.0f / spread);
        Range(e.has_residual ? Coin() : e.y_signed, e.zero_point, e.lo, e.hi);
        e.inner_scale = Coin(0.3) ? 0.0625f : Real(0.01f, 0.1f);
        e.y_scale = Coin(0.3) ? 0.125f : Real(0.02f, 0.2f);
        if (Coin(0.3)) {  // in proportion: many sums tie, which roundings decide
          const auto multiple = [&](int64_t least) { return static_cast<float>(Int(least, 99)) / 1280.0f; };
          e.inner_scale = multiple(10);
          e.residual_scale = multiple(10);
          e.y_scale = multiple(30);
          if (e.has_residual && Coin()) {  // of bytes from 0 on
            e.residual_signed = e.y_signed = false;
            e.residual_zero_point = e.y_zero_point = e.y_lo = 0;
            e.y_hi = 255;
          }
        }
        break;
      case EpilogueKind::kFloat:
        e.quantized_output = false;
        e.acc_scale = scales(1.0f / spread);
        break;
      case EpilogueKind::kThresholds: {
        e.threshold_count = Int(1, 15);
        // Mostly as of a quantizer: steps of one size, codes from one on.
        const bool is_uniform = Coin(0.7);
        const int64_t base = e.y_signed ? Int(-100, 100) : Int(0, 200);
        for (size_t c = 0; c < channels; ++c) {
          std::vector<int32_t> row(static_cast<size_t>(e.threshold_count));
          const float first = Real(-2 * spread, 2 * spread), step = Real(0.5f, spread);
          for (size_t k = 0; k < row.size(); ++k)
            row[k] = static_cast<int32_t>(is_uniform ? first + static_cast<float>(k) * step
                                                     : Real(-2 * spread, 2 * spread));
          if (Coin(is_uniform ? 0.01 : 0.1)) row[0] = std::numeric_limits<int32_t>::min();
          if (Coin(is_uniform ? 0.01 : 0.1)) row[0] = std::numeric_limits<int32_t>::max();
          const int32_t dir = Coin(0.8) ? 1 : -1;
          std::sort(row.begin(), row.end());
          if (dir < 0) std::reverse(row.begin(), row.end());
          e.thresholds.insert(e.thresholds.end(), row.begin(), row.end());
          e.dir.push_back(dir);
          e.base.push_back(static_cast<int32_t>(is_uniform   ? base
                                                : e.y_signed ? Int(-100, 100)
                                                             : Int(0, 200)));
        }
        e.has_residual = is_uniform && Coin(0.4);
        if (!e.has_residual) break;
        e.lo = e.base.front();
        e.hi = e.lo + static_cast<int32_t>(e.threshold_count);
        e.zero_point = e.lo + static_cast<int32_t>(Int(-20, 20));
        e.inner_scale = Coin(0.3) ? 0.0625f : Real(0.01f, 0.1f);
        if (Coin()) e.y_scale = Real(0.02f, 0.2f);
        break;
      }
      case EpilogueKind::kTail:
        e.quantized_output = Coin(0.7);
        e.acc_scale = scales(1.0f / spread);
        for (const TailStep step : {TailStep::kBias, TailStep::kAffine, TailStep::kResidual, TailStep::kRelu,
                                    TailStep::kClip, TailStep::kSilu, TailStep::kHardSwish}) {
          if (Coin()) e.tail.push_back(step);
        }
        std::shuffle(e.tail.begin(), e.tail.end(), random_);
        e.has_residual = std::count(e.tail.begin(), e.tail.end(), TailStep::kResidual) > 0;
        e.tail_bias = scales(0.3f);
        e.tail_scale = scales(1.0f);
        e.tail_shift = scales(0.2f);
        e.clip_min = -1.0f;
        e.clip_max = 2.0f;
        e.y_scale = 0.02f;
        if (!e.quantized_output || Coin(0.3)) break;
        // A float bias alone, mostly, and residuals behind it or behind the rounding.
        e.tail.assign(Coin(0.9) ? 1 : 0, TailStep::kBias);
        e.has_residual = false;
        for (float& bias : e.tail_bias) bias *= Coin() ? 1.0f : -1.0f;
        if (Coin()) e.y_scale = Real(0.005f, 0.2f);
        const bool has_function = Coin(0.4);
        if (has_function) e.tail.push_back(Coin() ? TailStep::kSilu : TailStep::kHardSwish);
        if (has_function && Coin()) break;
        if (Coin()) {
          e.tail.push_back(TailStep::kResidual);
          e.has_residual = true;
          if (Coin()) {  // as behind ReLU
            e.y_lo = e.y_zero_point = 0;
            e.y_hi = e.y_signed || Coin() ? 127 : 255;
          }
          break;
        }
        if (has_function) break;
        e.has_residual = e.adds_behind_tail = Coin(0.4);
        if (!e.has_residual) break;
        Range(Coin(), e.zero_point, e.lo, e.hi);
        e.inner_scale = Coin(0.3) ? 0.0625f : Real(0.01f, 0.1f);
        break;
    }
  }
};

class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) { Check(cudaMalloc(&data_, std::max<size_t>(bytes, 1)), "cudaMalloc"); }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  void* Get() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Synchronizes, or names the kernel that hangs and ends the program.
void SynchronizeOrExit(const std::string& what) {
  const auto start = std::chrono::steady_clock::now();
  while (cudaStreamQuery(nullptr) == cudaErrorNotReady) {
    if (std::chrono::steady_clock::now() - start < std::chrono::seconds(5)) continue;
    std::cout << "HANGS " << what << std::endl;
    std::_Exit(3);
  }
  Check(cudaDeviceSynchronize(), what.c_str());
}

struct Counts {
  int64_t runs = 0, wrong_runs = 0;
};

// The ways a launch reaches the device: at once, in a graph, in a graph whose nodes got other pointers.
enum class Way { kStream, kGraph, kUpdatedGraph };

// `launch(queue, elsewhere)`; elsewhere: with other pointers.
void Run(const std::function<void(cuda::Queue&, bool)>& launch, Way way, bool overlap) {
  cudaStream_t stream = nullptr;
  if (way == Way::kStream) {
    cuda::Queue queue(stream, overlap);
    launch(queue, false);
    return;
  }
  Check(cudaStreamCreate(&stream), "stream");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cuda::RecordedNodes nodes;
  cuda::Queue queue(stream, overlap);
  queue.Record(&nodes);
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  const bool updates = way == Way::kUpdatedGraph;
  launch(queue, updates);
  Check(cudaStreamEndCapture(stream, &graph), "capture");
  Check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  if (updates) {
    cuda::Queue update(stream, overlap);
    update.Update(executable, &nodes);
    launch(update, false);
  }
  Check(cudaGraphLaunch(executable, stream), "launch");
  Check(cudaStreamSynchronize(stream), "synchronize");
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// The quantizer and the floats that become a node's input: NaN, infinities and ties among them.
cuda::PixelQuantizer MakePixels(const ConvSpec& spec, const ConvShape& s, Generator& generator,
                                std::vector<float>& floats, std::vector<uint8_t>& codes,
                                bool planes = false) {
  const int64_t channels = spec.geometry.in_channels, plane = s.in_h * s.in_w;
  cuda::PixelQuantizer quantizer;
  quantizer.planes = planes || generator.Coin(0.7);
  quantizer.lo = spec.x.MinCode();
  quantizer.hi = spec.x.MaxCode();
  for (int64_t c = 0; c < channels; ++c) {
    quantizer.scale.push_back(generator.Coin(0.3) ? 0.25f : generator.Real(0.01f, 0.5f));
    quantizer.zero_point.push_back(generator.Code(spec.x));
  }
  floats.resize(codes.size());
  for (int64_t image = 0; image < s.batch; ++image) {
    for (int64_t pixel = 0; pixel < plane; ++pixel) {
      for (int64_t c = 0; c < channels; ++c) {
        const size_t k = static_cast<size_t>(c);
        float v = quantizer.scale[k] * generator.Real(-150.0f, 150.0f);
        if (generator.Coin(0.1)) v = quantizer.scale[k] * (0.5f + static_cast<float>(generator.Int(-99, 99)));
        if (generator.Coin(0.01)) {
          v = generator.Of({std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(), 3e38f});
        }
        const int64_t last = (image * plane + pixel) * channels + c;
        floats[static_cast<size_t>(quantizer.planes ? (image * channels + c) * plane + pixel : last)] = v;
        codes[static_cast<size_t>(last)] = static_cast<uint8_t>(
            QuantizeCode(v, quantizer.scale[k], quantizer.zero_point[k], quantizer.lo, quantizer.hi));
      }
    }
  }
  return quantizer;
}

// The code of the definition (lowbit.ops) of two bytes.
uint8_t Added(const cuda::ResidualSum& sum, uint8_t code, uint8_t residual) {
  const int32_t r = sum.residuals.is_signed ? static_cast<int8_t>(residual) : residual;
  const float of_residual = DequantizeCode(r, sum.residuals.scale, sum.residuals.zero_point);
  const float v = sum.multiplies ? sum.values[code] * of_residual : sum.values[code] + of_residual;
  return static_cast<uint8_t>(QuantizeCode(v, sum.y.scale, sum.y.zero_point, sum.lo, sum.hi));
}

// What a node of class "planes" reads and stores: the input, the residuals, of so many bits, the codes or more of them in
// planes, as kernels take them.
TensorPlanes DrawPlanes(Generator& generator, const cuda::PackedConv& packed, int residual_bits) {
  TensorPlanes planes;
  if (generator.Coin(0.7)) planes.x = cuda::PlanesRead(packed);
  if (packed.MayAddPlanes(residual_bits) && generator.Coin(0.7)) planes.added = residual_bits;
  if (planes.x > 0 && generator.Coin(0.3)) return planes;
  for (const int count : {1, 2}) {
    if (planes.y == 0 && packed.MayStorePlanes(count)) planes.y = count;
  }
  return planes;
}

// Tensors, some channels of which are a node's codes or what tables have for them.
class Places {
 public:
  Places() = default;
  Places(Generator& generator, int64_t channels, const std::vector<uint8_t>& codes) {
    where_.keeps_output = generator.Coin();
    for (int64_t i = generator.Int(1, cuda::kMostPlaces); i > 0; --i) {
      const int64_t runs = channels / 16;
      cuda::ConvPlace place;
      place.first = 16 * generator.Int(0, runs - 1);
      place.count = 16 * generator.Int(1, runs - place.first / 16);
      place.at = 16 * generator.Int(0, 3);
      place.channels = place.at + place.count + 16 * generator.Int(0, 2);
      std::vector<uint8_t> table;
      if (generator.Coin()) {
        table = generator.Codes({8, Encoding::kUnsigned}, 256);
        auto& memory = tables_.emplace_back(std::make_unique<DeviceBuffer>(table.size()));
        Check(cudaMemcpy(memory->Get(), table.data(), table.size(), cudaMemcpyHostToDevice), "copy a table");
        place.table = static_cast<const uint8_t*>(memory->Get());
      }
      std::vector<uint8_t>& tensor = expected_.emplace_back(
          codes.size() / static_cast<size_t>(channels) * static_cast<size_t>(place.channels), uint8_t{0xA5});
      for (size_t k = 0; k < codes.size(); ++k) {
        const int64_t pixel = static_cast<int64_t>(k) / channels,
                      channel = static_cast<int64_t>(k) % channels - place.first;
        if (channel < 0 || channel >= place.count) continue;
        tensor[static_cast<size_t>(pixel * place.channels + place.at + channel)] =
            table.empty() ? codes[k] : table[codes[k]];
      }
      Add(place);
    }
  }
  // What float results become on grids, which may be kept besides, or have to be.
  Places(Generator& generator, int64_t channels, std::span<const float> values, bool keeps) {
    where_.keeps_output = keeps || generator.Coin();
    for (int64_t i = generator.Int(1, cuda::kMostPlaces); i > 0; --i) {
      const bool is_signed = generator.Coin();
      const int32_t lo = is_signed ? -128 : 0;
      const Quantizer grid{true,
                           generator.Real(0.01f, 1.0f),
                           static_cast<int32_t>(generator.Int(-90, 90)),
                           lo + 3,
                           lo + 250,
                           is_signed};
      std::vector<uint8_t>& tensor = expected_.emplace_back();
      for (const float v : values)
        tensor.push_back(
            static_cast<uint8_t>(QuantizeCode(v, grid.scale, grid.zero_point, grid.lo, grid.hi)));
      Add({0, channels, 0, channels, nullptr, grid});
    }
  }

  // Float results lie as float16, what is added to them does.
  void LieAsHalves(bool makes, bool adds) {
    where_.makes_halves = makes;
    where_.adds_halves = adds;
  }

  const cuda::ConvPlaces& Where() const { return where_; }
  std::span<void* const> Tensors() const { return tensors_; }
  void Poison() const {
    for (size_t i = 0; i < tensors_.size(); ++i)
      Check(cudaMemset(tensors_[i], 0xA5, expected_[i].size()), "poison");
  }
  int64_t CountWrong() const {
    int64_t wrong = 0;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      std::vector<uint8_t> found(expected_[i].size());
      Check(cudaMemcpy(found.data(), tensors_[i], found.size(), cudaMemcpyDeviceToHost), "copy a place");
      for (size_t k = 0; k < found.size(); ++k) wrong += found[k] != expected_[i][k] ? 1 : 0;
    }
    return wrong;
  }

 private:
  void Add(const cuda::ConvPlace& place) {
    memory_.push_back(std::make_unique<DeviceBuffer>(expected_.back().size()));
    tensors_.push_back(memory_.back()->Get());
    where_.list.push_back(place);
  }

  cuda::ConvPlaces where_;
  std::vector<std::unique_ptr<DeviceBuffer>> tables_, memory_;
  std::vector<std::vector<uint8_t>> expected_;
  std::vector<void*> tensors_;
};

// The bytes of the nearest float16 numbers, which the numbers become.
std::vector<uint8_t> AsHalves(std::span<float> numbers) {
  std::vector<uint8_t> bytes(numbers.size() * sizeof(uint16_t));
  for (size_t i = 0; i < numbers.size(); ++i) {
    const uint16_t half = ToHalf(numbers[i]);
    numbers[i] = FromHalf(half);
    std::memcpy(&bytes[i * sizeof half], &half, sizeof half);
  }
  return bytes;
}

// Returns whether all configurations agree.
bool TestNode(const Node& node, Generator& generator, const cuda::Device& device,
              std::map<std::string, Counts>& by, size_t most, const std::string& text) {
  const ConvSpec& spec = node.spec;
  const ConvShape& s = node.shape;
  const ConvGeometry& g = spec.geometry;
  const int64_t outputs = s.OutPixels() * g.out_channels;
  constexpr size_t guard = 256;
  std::vector<uint8_t> x = generator.Codes(spec.x, s.batch * s.in_h * s.in_w * g.in_channels);
  std::vector<float> floats;
  std::optional<cuda::PixelQuantizer> quantizer;
  if (cuda::FitsPixels(spec)) quantizer = MakePixels(spec, s, generator, floats, x);
  std::vector<uint8_t> residual;
  const bool has_planes = node.kind == "planes";
  const int residual_bits = has_planes ? generator.Of({1, 2, 8, spec.x.bits, spec.x.bits}) : 8;
  if (spec.epilogue.has_residual) residual = generator.Codes({residual_bits, Encoding::kUnsigned}, outputs);
  std::vector<uint8_t> expected(static_cast<size_t>(outputs) * (spec.epilogue.quantized_output ? 1 : 4));
  Threads pool;
  const auto reference = ReferenceRows()[0].create(spec);
  reference->Run({s, x.data(), residual.empty() ? nullptr : residual.data(), expected.data()}, pool);

  cuda::StoredAs stored;
  std::optional<cuda::CodeGrid>& dequantized = stored.dequantized;
  if (spec.epilogue.quantized_output && !has_planes && generator.Coin(0.15)) {
    const Epilogue& e = spec.epilogue;
    dequantized = {e.y_signed, generator.Real(0.01f, 0.1f), static_cast<int32_t>(generator.Int(-100, 100))};
    std::vector<uint8_t> values(static_cast<size_t>(outputs) * 4);
    for (size_t i = 0; i < expected.size(); ++i) {
      const int32_t code = e.y_signed ? static_cast<int8_t>(expected[i]) : expected[i];
      const float value = DequantizeCode(code, dequantized->scale, dequantized->zero_point);
      std::memcpy(&values[i * 4], &value, 4);
    }
    expected = std::move(values);
  } else if (spec.epilogue.quantized_output && !spec.epilogue.has_residual && !has_planes &&
             generator.Coin(0.45)) {
    stored.table = generator.Codes({8, Encoding::kUnsigned}, 256);
    if (!cuda::StepsOf(spec.epilogue) && generator.Coin()) {
      stored.added = generator.Sum();
      residual = generator.Codes({8, Encoding::kUnsigned}, outputs);
      for (size_t i = 0; i < expected.size(); ++i)
        expected[i] = Added(*stored.added, expected[i], residual[i]);
    } else {
      for (uint8_t& code : expected) code = stored.table[code];
    }
  }
  std::vector<float> results(spec.epilogue.quantized_output ? 0 : expected.size() / 4);
  std::memcpy(results.data(), expected.data(), results.size() * 4);
  const bool makes_halves = !results.empty() && generator.Coin(), adds_halves = generator.Coin();
  if (!results.empty() && !spec.epilogue.has_residual && generator.Coin()) {
    const float low = generator.Coin() ? 0.0f : -std::numeric_limits<float>::infinity();
    stored.float_sum = cuda::FloatLimits{low, generator.Real(0.5f, 100.0f)};
    std::vector<float> added(results.size());
    for (float& v : added) v = generator.Real(-3.0f, 3.0f);
    residual.resize(expected.size());
    if (adds_halves) {
      residual = AsHalves(added);
    } else {
      std::memcpy(residual.data(), added.data(), residual.size());
    }
    for (size_t i = 0; i < added.size(); ++i)
      results[i] = std::min(std::max(results[i] + added[i], low), stored.float_sum->high);
    std::memcpy(expected.data(), results.data(), expected.size());
  }
  if (makes_halves) expected = AsHalves(results);
  auto packed = cuda::PackConv(spec, device, {}, stored);
  if (generator.Coin(0.3)) {  // as a compiled model brings it
    ConvSpec lean = spec;
    lean.weights.clear();
    packed = cuda::PackConv(lean, device, cuda::SavePacked(*packed), stored);
  }
  TensorPlanes planes = has_planes ? DrawPlanes(generator, *packed, residual_bits) : TensorPlanes{};
  if (node.kind == "flat bits" && generator.Coin()) planes.x = cuda::PlanesRead(*packed);
  if (planes.x > 0) x = cuda::AsPlanes(x, g.in_channels, planes.x);
  if (planes.added > 0) residual = cuda::AsPlanes(residual, g.out_channels, planes.added);
  if (planes.y > 0) expected = cuda::AsPlanes(expected, g.out_channels, planes.y);
  const size_t y_bytes = expected.size();
  const int64_t elements = planes.y > 0 ? static_cast<int64_t>(y_bytes) : outputs;
  std::vector<uint8_t> found(y_bytes + guard);
  Places places;
  if (!has_planes && spec.epilogue.quantized_output && !dequantized && g.out_channels % 16 == 0 &&
      generator.Coin(0.3))
    places = Places(generator, g.out_channels, expected);
  if (!results.empty() && generator.Coin(0.3))
    places = Places(generator, g.out_channels, results, makes_halves);
  places.LieAsHalves(makes_halves, adds_halves && stored.float_sum);
  std::vector<cuda::ConvConfig> configs =
      cuda::CandidateConfigs(*packed, s, !places.Where().list.empty(), planes);
  std::erase_if(configs, [&](const auto& c) { return c.Text().find(text) == std::string::npos; });
  if (configs.size() > most) {
    for (size_t i = 1; i + 1 < configs.size(); ++i) {
      std::swap(configs[i], configs[static_cast<size_t>(generator.Int(
                                static_cast<int64_t>(i), static_cast<int64_t>(configs.size()) - 2))]);
    }
    configs.erase(configs.begin() + static_cast<int64_t>(most) - 1, configs.end() - 1);
  }
  DeviceBuffer device_x(x.size()), device_r(residual.size()), device_y(y_bytes + guard);
  DeviceBuffer device_floats(floats.size() * 4), elsewhere(std::max(x.size() * 4, y_bytes + guard));
  if (!floats.empty()) {
    Check(cudaMemcpy(device_floats.Get(), floats.data(), floats.size() * 4, cudaMemcpyHostToDevice),
          "copy x");
  }
  Check(cudaMemcpy(device_x.Get(), x.data(), x.size(), cudaMemcpyHostToDevice), "copy x");
  if (!residual.empty()) {
    Check(cudaMemcpy(device_r.Get(), residual.data(), residual.size(), cudaMemcpyHostToDevice),
          "copy residual");
  }
  bool equal = true;
  std::vector<std::shared_ptr<const cuda::ConvPlan>> plans;
  for (const auto& config : configs)
    plans.push_back(cuda::PlanConv(packed, s, config, places.Where(), planes));
  const size_t from_codes = plans.size();
  const bool has_image =
      std::any_of(configs.begin(), configs.end(), [](const auto& c) { return c.kernel == &cuda::kImageRow; });
  const bool has_halves = places.Where().makes_halves || places.Where().adds_halves;
  if (quantizer.has_value() && has_image && places.Where().list.empty() && !has_halves)
    plans.push_back(cuda::PlanPixels(packed, s, *quantizer));
  for (size_t i = 0; i < plans.size(); ++i) {
    const auto& plan = plans[i];
    const bool from_floats = i >= from_codes;
    const cuda::ConvConfig config = cuda::PlanConfig(*plan);
    DeviceBuffer workspace(cuda::PlanWorkspaceBytes(*plan));
    const bool overlap = generator.Coin();
    Check(cudaMemset(workspace.Get(), 0xA5, cuda::PlanWorkspaceBytes(*plan)), "poison");
    Check(cudaMemset(device_y.Get(), 0xA5, y_bytes + guard), "poison");
    places.Poison();
    const void* const from = from_floats ? device_floats.Get() : device_x.Get();
    Run(
        [&](cuda::Queue& queue, bool moved) {
          cuda::LaunchConv(*plan, moved ? elsewhere.Get() : from, residual.empty() ? nullptr : device_r.Get(),
                           moved ? elsewhere.Get() : device_y.Get(), workspace.Get(), queue,
                           places.Tensors());
        },
        generator.Of({Way::kStream, Way::kStream, Way::kGraph, Way::kUpdatedGraph}),
        overlap && device.capability >= 90);
    SynchronizeOrExit(node.kind + " " + config.Text());
    Check(cudaMemcpy(found.data(), device_y.Get(), y_bytes + guard, cudaMemcpyDeviceToHost), "copy y");
    const std::string of_planes = planes != TensorPlanes{}
                                      ? " planes " + std::to_string(planes.x) + "+" +
                                            std::to_string(planes.added) + ">" + std::to_string(planes.y)
                                      : "";
    Counts& counts = by[from_floats          ? config.Text() + " floats"
                        : config.stages == 0 ? config.Text()
                                             : config.Text().substr(0, config.Text().find("_stages")) +
                                                   (config.splits == 1                      ? ""
                                                    : config.split == cuda::Split::kCluster ? " cluster"
                                                                                            : " workspace") +
                                                   of_planes];
    ++counts.runs;
    int64_t wrong = places.CountWrong(), first = -1;
    if (!places.Where().keeps_output) {  // nothing is written
      wrong += std::count_if(found.begin(), found.end(), [](uint8_t b) { return b != 0xA5; });
    } else if (std::memcmp(expected.data(), found.data(), y_bytes) != 0) {
      const int64_t width = static_cast<int64_t>(y_bytes) / elements;
      for (int64_t i = 0; i < elements; ++i) {
        if (std::memcmp(&expected[static_cast<size_t>(i * width)], &found[static_cast<size_t>(i * width)],
                        static_cast<size_t>(width)) != 0) {
          if (first < 0) first = i;
          ++wrong;
        }
      }
    }
    const bool overrun = std::any_of(found.begin() + static_cast<int64_t>(y_bytes), found.end(),
                                     [](uint8_t b) { return b != 0xA5; });
    if (wrong == 0 && !overrun) continue;
    equal = false;
    ++counts.wrong_runs;
    std::cout << "WRONG " << node.kind << " " << config.Text() << (overlap ? " overlap" : "") << ": " << wrong
              << " of " << elements << " elements, first " << first << of_planes
              << (overrun ? ", guard bytes overwritten" : "") << "; x " << s.batch << "x" << s.in_h << "x"
              << s.in_w << "x" << g.in_channels << " -> " << s.out_h << "x" << s.out_w << "x"
              << g.out_channels << " kernel " << g.kernel_h << "x" << g.kernel_w << " group " << g.group
              << " encodings " << static_cast<int>(spec.x.encoding) << "/"
              << static_cast<int>(spec.w.encoding) << " bits " << spec.x.bits << "/" << spec.w.bits
              << " epilogue " << static_cast<int>(spec.epilogue.kind) << " residual "
              << spec.epilogue.has_residual << " places " << places.Where().list.size() << "\n";
  }
  return equal;
}

// Both products in one kernel against one after the other. `in_planes`: what is read and made lies in planes.
bool TestResidualPair(const ResidualPairCase& pair, Generator& generator, const cuda::Device& device,
                      std::map<std::string, Counts>& by, size_t most, const std::string& text,
                      bool in_planes = false) {
  const auto [first_shape, second_shape] = pair.shapes;
  const int64_t outputs = second_shape.OutPixels() * pair.second.geometry.out_channels;
  constexpr size_t guard = 256;
  const auto codes = [&](const ConvSpec& spec, const ConvShape& s) {
    return generator.Codes(spec.x, s.batch * s.in_h * s.in_w * spec.geometry.in_channels);
  };
  std::vector<uint8_t> first_x = codes(pair.first, first_shape), second_x = codes(pair.second, second_shape);
  std::vector<uint8_t> between(static_cast<size_t>(outputs)), expected(static_cast<size_t>(outputs));
  Threads pool;
  ReferenceRows()[0].create(pair.first)->Run({first_shape, first_x.data(), nullptr, between.data()}, pool);
  ReferenceRows()[0]
      .create(pair.second)
      ->Run({second_shape, second_x.data(), between.data(), expected.data()}, pool);

  const TensorPlanes planes = in_planes ? PlanesOf(pair) : TensorPlanes{};
  if (in_planes) {
    first_x = cuda::AsPlanes(first_x, pair.first.geometry.in_channels, planes.x);
    second_x = cuda::AsPlanes(second_x, pair.second.geometry.in_channels, planes.x);
    expected = cuda::AsPlanes(expected, pair.second.geometry.out_channels, planes.y);
  }
  const size_t y_bytes = expected.size();
  std::vector<uint8_t> found(y_bytes + guard);

  const cuda::ResidualPair packed{cuda::PackConv(pair.first, device), cuda::PackConv(pair.second, device)};
  std::vector<cuda::ConvConfig> configs = in_planes ? cuda::BitPairConfigs(packed, pair.shapes, planes)
                                                    : cuda::ResidualPairConfigs(packed, pair.shapes);
  std::erase_if(configs, [&](const auto& c) {
    return c.kernel == &cuda::kSeparateKernels || c.Text().find(text) == std::string::npos;
  });
  while (configs.size() > most) {
    configs.erase(configs.begin() + generator.Int(0, static_cast<int64_t>(configs.size()) - 1));
  }
  DeviceBuffer device_first(first_x.size()), device_second(second_x.size()), device_y(y_bytes + guard),
      elsewhere(std::max(second_x.size(), y_bytes + guard));
  Check(cudaMemcpy(device_first.Get(), first_x.data(), first_x.size(), cudaMemcpyHostToDevice), "copy x");
  Check(cudaMemcpy(device_second.Get(), second_x.data(), second_x.size(), cudaMemcpyHostToDevice), "copy x");
  bool equal = true;
  for (const cuda::ConvConfig& config : configs) {
    const auto of_bytes = in_planes ? nullptr : cuda::PlanResidualPair(packed, pair.shapes, config);
    const auto of_bits = in_planes ? cuda::PlanBitPair(packed, pair.shapes, config) : nullptr;
    Check(cudaMemset(device_y.Get(), 0xA5, y_bytes + guard), "poison");
    const auto launch = [&](cuda::Queue& queue, bool moved) {
      const void* const second_from = moved ? elsewhere.Get() : device_second.Get();
      void* const to = moved ? elsewhere.Get() : device_y.Get();
      if (in_planes) {
        cuda::LaunchBitPair(*of_bits, device_first.Get(), second_from, to, queue);
      } else {
        cuda::LaunchResidualPair(*of_bytes, device_first.Get(), second_from, to, queue);
      }
    };
    Run(launch, generator.Of({Way::kStream, Way::kStream, Way::kGraph, Way::kUpdatedGraph}),
        generator.Coin());
    SynchronizeOrExit("pair " + config.Text());
    Check(cudaMemcpy(found.data(), device_y.Get(), y_bytes + guard, cudaMemcpyDeviceToHost), "copy y");
    Counts& counts = by[(in_planes ? "bit_pair_" : "pair_") + std::to_string(config.tile_m) + "x" +
                        std::to_string(config.tile_n) + (config.keeps_weights ? "_kept" : "") +
                        (pair.first.epilogue.kind == EpilogueKind::kTail ? "_tail" : "")];
    ++counts.runs;
    int64_t wrong = 0, at = -1;
    for (size_t i = 0; i < y_bytes; ++i) {
      if (expected[i] == found[i]) continue;
      if (at < 0) at = static_cast<int64_t>(i);
      ++wrong;
    }
    const bool overrun = std::any_of(found.begin() + static_cast<int64_t>(y_bytes), found.end(),
                                     [](uint8_t b) { return b != 0xA5; });
    if (wrong == 0 && !overrun) continue;
    equal = false;
    ++counts.wrong_runs;
    std::cout << "WRONG " << config.Text() << ": " << wrong << " of " << y_bytes << " elements, first " << at
              << (overrun ? ", guard bytes overwritten" : "");
    for (const bool is_second : {false, true}) {
      const ConvGeometry& g = (is_second ? pair.second : pair.first).geometry;
      const ConvShape& s = is_second ? second_shape : first_shape;
      std::cout << "; x " << s.batch << "x" << s.in_h << "x" << s.in_w << "x" << g.in_channels << " -> "
                << s.out_h << "x" << s.out_w << "x" << g.out_channels << " kernel " << g.kernel_h << "x"
                << g.kernel_w << " stride " << g.stride_h << "x" << g.stride_w;
    }
    std::cout << "\n";
  }
  return equal;
}

// Residual blocks in one kernel against one convolution after the other.
bool TestBitBlocks(const BitBlocksCase& blocks, Generator& generator, const cuda::Device& device,
                   std::map<std::string, Counts>& by, size_t most, const std::string& text) {
  const ConvSpec& widest = blocks.specs[0][0];
  const int64_t pixels = blocks.shape.OutPixels(), channels = widest.geometry.in_channels;
  constexpr size_t guard = 256;
  std::vector<uint8_t> x = generator.Codes(widest.x, pixels * channels), expected = x;
  Threads pool;
  for (const auto& block : blocks.specs) {
    const std::vector<uint8_t> added = expected;
    for (const ConvSpec& spec : block) {
      const std::vector<uint8_t> read = std::exchange(
          expected, std::vector<uint8_t>(static_cast<size_t>(pixels * spec.geometry.out_channels)));
      ReferenceRows()[0].create(spec)->Run(
          {blocks.shape, read.data(), spec.epilogue.has_residual ? added.data() : nullptr, expected.data()},
          pool);
    }
  }
  x = cuda::AsPlanes(x, channels, widest.x.bits);
  expected = cuda::AsPlanes(expected, channels, widest.x.bits);
  const size_t y_bytes = expected.size();
  std::vector<uint8_t> found(y_bytes + guard);

  const cuda::BitBlocks packed = blocks.Packed(device);
  std::vector<cuda::BitBlocksConfig> configs = cuda::BitBlocksConfigs(packed);
  std::erase_if(configs, [&](const auto& c) { return c.Text().find(text) == std::string::npos; });
  while (configs.size() > most)
    configs.erase(configs.begin() + generator.Int(0, static_cast<int64_t>(configs.size()) - 1));
  DeviceBuffer device_x(y_bytes + guard), device_y(y_bytes + guard);
  bool equal = true;
  for (const cuda::BitBlocksConfig& config : configs) {
    const auto plan = cuda::PlanBitBlocks(packed, config);
    const bool is_over = generator.Coin(0.3);
    DeviceBuffer& to = is_over ? device_x : device_y;
    Check(cudaMemset(to.Get(), 0xA5, y_bytes + guard), "poison");
    Check(cudaMemcpy(device_x.Get(), x.data(), y_bytes, cudaMemcpyHostToDevice), "copy x");
    cuda::Queue queue(nullptr, generator.Coin());
    cuda::LaunchBitBlocks(*plan, device_x.Get(), to.Get(), queue);
    SynchronizeOrExit(config.Text());
    Check(cudaMemcpy(found.data(), to.Get(), y_bytes + guard, cudaMemcpyDeviceToHost), "copy y");
    Counts& counts = by[config.Text()];
    ++counts.runs;
    int64_t wrong = 0;
    for (size_t i = 0; i < y_bytes; ++i) wrong += expected[i] != found[i] ? 1 : 0;
    const bool overrun = std::any_of(found.begin() + static_cast<int64_t>(y_bytes), found.end(),
                                     [](uint8_t b) { return b != 0xA5; });
    if (wrong == 0 && !overrun) continue;
    equal = false;
    ++counts.wrong_runs;
    std::cout << "WRONG " << config.Text() << ": " << wrong << " of " << y_bytes << " bytes"
              << (overrun ? ", guard bytes overwritten" : "") << "; " << blocks.specs.size() << " blocks, x "
              << blocks.shape.batch << "x" << blocks.shape.in_h << "x" << blocks.shape.in_w << "x" << channels
              << " by " << widest.geometry.out_channels << ", bits " << widest.x.bits << "\n";
  }
  return equal;
}

// As AffineSpec has it.
std::vector<uint8_t> AffineCodes(const AffineSpec& spec, const std::vector<uint8_t>& x) {
  std::vector<uint8_t> y;
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t c = i % static_cast<size_t>(spec.channels);
    const int32_t code = spec.x_signed ? static_cast<int8_t>(x[i]) : x[i];
    float v = static_cast<float>(code - spec.x_zero_point[c]) * spec.x_scale[c];
    if (spec.has_affine) {
      v = v * spec.scale[c];
      v = v + spec.shift[c];
    }
    const float rounded = std::nearbyint(v / spec.y_scale[c]) + static_cast<float>(spec.y_zero_point[c]);
    y.push_back(static_cast<uint8_t>(static_cast<int>(
        std::clamp(rounded, static_cast<float>(spec.quantizer.lo), static_cast<float>(spec.quantizer.hi)))));
  }
  return y;
}

// What a Concat along the channels makes.
std::vector<uint8_t> Joined(const ConcatNode& concat, const std::vector<std::vector<uint8_t>>& fed,
                            const std::vector<int64_t>& channels) {
  std::vector<std::vector<uint8_t>> parts;
  for (size_t i = 0; i < fed.size(); ++i) {
    AffineSpec spec = concat.parts[i].spec;
    spec.y_scale = {concat.quantizer.scale};
    spec.y_zero_point = {concat.quantizer.zero_point};
    spec.quantizer = concat.quantizer;
    parts.push_back(concat.parts[i].copied ? fed[i] : AffineCodes(spec, fed[i]));
  }
  std::vector<uint8_t> y;
  for (int64_t pixel = 0; pixel < static_cast<int64_t>(fed[0].size()) / channels[0]; ++pixel) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto begin = parts[i].begin() + pixel * channels[i];
      y.insert(y.end(), begin, begin + channels[i]);
    }
  }
  return y;
}

// All in one kernel against one after the other; true where there is none.
bool TestAffineConv(const AffineConvCase& nodes, Generator& generator, const cuda::Device& device,
                    std::map<std::string, Counts>& by, size_t most, const std::string& text) {
  const ConvSpec& spec = nodes.conv.spec;
  const ConvGeometry& g = spec.geometry;
  const ConvShape& s = nodes.conv.shape;
  const bool joins = !nodes.joined.empty();
  const std::vector<int64_t> channels = joins ? nodes.joined : std::vector{g.in_channels};
  const auto lines = cuda::AffineLinesOf(nodes.affine);
  if (!lines) {
    ++by["affined: no lines"].runs;
    return true;
  }
  cuda::AffineConv packed{
      cuda::PackLines(*lines, g.in_channels, device), cuda::PackConv(spec, device), s, {}};
  std::vector<TensorShape> shapes;
  for (const int64_t each : channels)
    shapes.push_back({ElementType::kUInt8, {s.batch, s.in_h, s.in_w, each}});
  if (joins) {
    const auto behind = cuda::BehindConcat(nodes.concat, shapes, packed);
    if (!behind) {
      ++by["affined: no lines of a Concat"].runs;
      return true;
    }
    packed = *behind;
  }
  std::vector<cuda::ConvConfig> configs = cuda::AffineConvConfigs(*packed.conv, s);
  std::erase_if(configs, [&](const auto& c) {
    return c.kernel != &cuda::kAffineConvKernel || c.Text().find(text) == std::string::npos;
  });
  if (configs.empty()) {
    ++by["affined refuses"].runs;
    return true;
  }
  while (configs.size() > most)
    configs.erase(configs.begin() + generator.Int(0, static_cast<int64_t>(configs.size()) - 1));

  constexpr size_t guard = 256;
  const auto y_bytes = static_cast<size_t>(s.OutPixels() * g.out_channels),
             made_bytes = joins ? static_cast<size_t>(s.OutPixels() * g.in_channels) : 0;
  std::vector<std::vector<uint8_t>> x;
  std::vector<std::unique_ptr<DeviceBuffer>> device_x;
  std::vector<const void*> fed;
  for (const int64_t each : channels) {
    x.push_back(generator.Codes({8, Encoding::kUnsigned}, s.OutPixels() * each));
    device_x.push_back(std::make_unique<DeviceBuffer>(x.back().size()));
    fed.push_back(device_x.back()->Get());
    Check(cudaMemcpy(device_x.back()->Get(), x.back().data(), x.back().size(), cudaMemcpyHostToDevice),
          "copy x");
  }
  const std::vector<uint8_t> made = joins ? Joined(nodes.concat, x, channels) : x[0];
  const std::vector<uint8_t> between = AffineCodes(nodes.affine, made);
  std::vector<uint8_t> expected(y_bytes), found(y_bytes + guard), found_made(made_bytes + guard);
  Threads pool;
  ReferenceRows()[0].create(spec)->Run({s, between.data(), nullptr, expected.data()}, pool);
  DeviceBuffer device_y(found.size()), device_made(found_made.size()),
      elsewhere(std::max({made.size(), found.size(), found_made.size()}));
  bool equal = true;
  for (const cuda::ConvConfig& config : configs) {
    const auto plan = cuda::PlanAffineConv(packed, config);
    Check(cudaMemset(device_y.Get(), 0xA5, found.size()), "poison");
    Check(cudaMemset(device_made.Get(), 0xA5, found_made.size()), "poison");
    Run(
        [&](cuda::Queue& queue, bool moved) {
          std::vector<const void*> of_run = fed;
          if (moved) of_run[0] = elsewhere.Get();
          void* const to = moved ? elsewhere.Get() : device_made.Get();
          cuda::LaunchAffineConv(*plan, of_run, joins ? to : nullptr,
                                 moved ? elsewhere.Get() : device_y.Get(), queue);
        },
        generator.Of({Way::kStream, Way::kStream, Way::kGraph, Way::kUpdatedGraph}), generator.Coin());
    SynchronizeOrExit(config.Text());
    Check(cudaMemcpy(found.data(), device_y.Get(), found.size(), cudaMemcpyDeviceToHost), "copy y");
    Check(cudaMemcpy(found_made.data(), device_made.Get(), found_made.size(), cudaMemcpyDeviceToHost),
          "copy what is joined");
    const cuda::ConvConfig tiles{&cuda::kWgmmaRow, config.tile_m, config.tile_n, config.stages,
                                 config.splits};
    const auto finish = static_cast<int>(cuda::FinishOf(packed.conv->Params(s, tiles).epilogue));
    Counts& counts = by["affined_" + std::to_string(config.tile_m) + "x" + std::to_string(config.tile_n) +
                        (config.splits > 1 ? " cluster" : ", finish " + std::to_string(finish)) +
                        (joins ? ", joins" : "")];
    ++counts.runs;
    const auto differ = [](const std::vector<uint8_t>& a, const std::vector<uint8_t>& b, size_t count) {
      return std::mismatch(a.begin(), a.begin() + static_cast<int64_t>(count), b.begin()).first - a.begin();
    };
    const auto overran = [](const std::vector<uint8_t>& all, size_t count) {
      return std::any_of(all.begin() + static_cast<int64_t>(count), all.end(),
                         [](uint8_t b) { return b != 0xA5; });
    };
    const int64_t of_y = differ(expected, found, y_bytes), of_made = differ(made, found_made, made_bytes);
    const bool overrun = overran(found, y_bytes) || overran(found_made, made_bytes);
    if (of_y == static_cast<int64_t>(y_bytes) && of_made == static_cast<int64_t>(made_bytes) && !overrun)
      continue;
    equal = false;
    ++counts.wrong_runs;
    std::cout << "WRONG " << config.Text() << ": first " << of_y << " of " << y_bytes << ", " << of_made
              << " of " << made_bytes << " joined" << (overrun ? ", guard bytes overwritten" : "") << "; x "
              << s.batch << "x" << s.in_h << "x" << s.in_w << "x" << g.in_channels << " -> " << g.out_channels
              << "\n";
  }
  return equal;
}

// As one node, which is one kernel at most shapes, against one after the other.
bool TestGated(const GatedCase& nodes, Generator& generator, const cuda::Device& device,
               std::map<std::string, Counts>& by) {
  const ConvSpec& spec = nodes.product.conv;
  const BinarySpec& multiply = nodes.multiply.spec;
  const int64_t k = spec.geometry.in_channels, n = spec.geometry.out_channels;
  const ConvShape shape = {nodes.batch, 1, 1, 1, 1};
  const std::vector<uint8_t> x = generator.Codes(spec.x, nodes.batch * k),
                             image = generator.Codes({8, Encoding::kUnsigned},
                                                     nodes.batch * nodes.height * nodes.width * n);
  std::vector<uint8_t> gates(static_cast<size_t>(nodes.batch * n));
  Threads pool;
  ReferenceRows()[0].create(spec)->Run({shape, x.data(), nullptr, gates.data()}, pool);
  const auto number = [&](uint8_t byte, bool is_first) {
    const bool is_signed = is_first ? multiply.a_signed : multiply.b_signed;
    return DequantizeCode(is_signed ? static_cast<int8_t>(byte) : byte,
                          is_first ? multiply.a_scale : multiply.b_scale,
                          is_first ? multiply.a_zero_point : multiply.b_zero_point);
  };
  const Quantizer& y = multiply.quantizer;
  std::vector<uint8_t> expected;
  for (size_t i = 0; i < image.size(); ++i) {
    const int64_t pixel = static_cast<int64_t>(i) / n, channel = static_cast<int64_t>(i) % n;
    uint8_t gate = gates[static_cast<size_t>(pixel / (nodes.height * nodes.width) * n + channel)];
    if (nodes.lookup) gate = nodes.lookup->table[gate];
    const float v = number(gate, nodes.made_first) * number(image[i], !nodes.made_first);
    expected.push_back(static_cast<uint8_t>(QuantizeCode(v, y.scale, y.zero_point, y.lo, y.hi)));
  }

  const auto type = [](bool is_signed) { return is_signed ? ElementType::kInt8 : ElementType::kUInt8; };
  const std::vector<int64_t> dims = {nodes.batch, nodes.height, nodes.width, n};
  const TensorShape fed[] = {{type(spec.x.encoding == Encoding::kSigned), {nodes.batch, 1, 1, k}},
                             {type(nodes.made_first ? multiply.b_signed : multiply.a_signed), dims}};
  const auto node =
      cuda::PackTableSum(nodes.product, nodes.Table(), nodes.multiply, nodes.made_first, device, {});
  const auto plan = node->Plan(fed, {type(y.is_signed), dims});
  constexpr size_t guard = 256;
  std::vector<uint8_t> found(expected.size() + guard);
  DeviceBuffer device_x(x.size()), device_image(image.size()), device_y(found.size()),
      workspace(plan->WorkspaceBytes()), elsewhere(std::max(x.size(), found.size()));
  Check(cudaMemcpy(device_x.Get(), x.data(), x.size(), cudaMemcpyHostToDevice), "copy x");
  Check(cudaMemcpy(device_image.Get(), image.data(), image.size(), cudaMemcpyHostToDevice), "copy an image");
  Check(cudaMemset(device_y.Get(), 0xA5, found.size()), "poison");
  Run(
      [&](cuda::Queue& queue, bool moved) {
        const void* const of_run[] = {moved ? elsewhere.Get() : device_x.Get(), device_image.Get()};
        plan->Launch(of_run, moved ? elsewhere.Get() : device_y.Get(), workspace.Get(), queue);
      },
      generator.Of({Way::kStream, Way::kStream, Way::kGraph, Way::kUpdatedGraph}), generator.Coin());
  SynchronizeOrExit(plan->Text());
  Check(cudaMemcpy(found.data(), device_y.Get(), found.size(), cudaMemcpyDeviceToHost), "copy y");
  Counts& counts = by[plan->Text() == "gated" ? "gated" : "gated: several kernels"];
  ++counts.runs;
  const auto first = std::mismatch(expected.begin(), expected.end(), found.begin()).first - expected.begin();
  const bool overrun = std::any_of(found.begin() + static_cast<int64_t>(expected.size()), found.end(),
                                   [](uint8_t b) { return b != 0xA5; });
  if (first == static_cast<int64_t>(expected.size()) && !overrun) return true;
  ++counts.wrong_runs;
  std::cout << "WRONG " << plan->Text() << ": first " << first << " of " << expected.size()
            << (overrun ? ", guard bytes overwritten" : "") << "; " << nodes.batch << "x" << nodes.height
            << "x" << nodes.width << "x" << n << ", products of " << k << "\n";
  return false;
}

// Returns whether all configurations of two convolutions in one launch agree; true where there are none.
bool TestChain(const Chain& nodes, Generator& generator, const cuda::Device& device,
               std::map<std::string, Counts>& by, size_t most, const std::string& text) {
  const auto& [first, second, maker, windows] = nodes;
  const ConvShape& s = first.shape;
  const auto x_count = [](const Node& node) {
    return node.shape.batch * node.shape.in_h * node.shape.in_w * node.spec.geometry.in_channels;
  };
  const auto y_bytes = static_cast<size_t>(s.OutPixels() * first.spec.geometry.out_channels),
             z_bytes = static_cast<size_t>(s.OutPixels() * second.spec.geometry.out_channels);
  constexpr size_t guard = 256;
  cuda::ConvChain chain{cuda::PackConv(first.spec, device), cuda::PackConv(second.spec, device), s, nullptr};
  if (maker) {
    chain.residuals = cuda::PackConv(maker->spec, device);
    chain.residuals_shape = maker->shape;
  }
  if (windows) {
    chain.windows = cuda::PackConv(windows->spec, device);
    chain.windows_shape = windows->shape;
  }
  std::vector<cuda::ChainConfig> configs = cuda::CandidateChains(chain);
  std::erase_if(configs, [&](const auto& c) { return c.Text().find(text) == std::string::npos; });
  configs.resize(std::min(configs.size(), most));
  if (configs.empty()) return true;

  // What windows make is read by what makes the residuals, or by the first.
  const Node& reads = windows && !maker ? *windows : first;
  const std::vector<uint8_t> x = generator.Codes(reads.spec.x, x_count(reads));
  std::vector<uint8_t> residual, made_of;
  Threads pool;
  const auto run = [&](const Node& node, const std::vector<uint8_t>& codes, size_t bytes) {
    std::vector<uint8_t> made(bytes);
    ReferenceRows()[0].create(node.spec)->Run({node.shape, codes.data(), nullptr, made.data()}, pool);
    return made;
  };
  const auto behind_windows = [&](const Node& node, const std::vector<uint8_t>& codes) {
    return windows ? run(*windows, codes, static_cast<size_t>(x_count(node))) : codes;
  };
  if (maker) {
    const Node& reads_for_it = windows ? *windows : *maker;
    made_of = generator.Codes(reads_for_it.spec.x, x_count(reads_for_it));
    residual = run(*maker, behind_windows(*maker, made_of), y_bytes);
  } else if (first.spec.epilogue.has_residual) {
    residual = generator.Codes({8, Encoding::kUnsigned}, static_cast<int64_t>(y_bytes));
  }
  const std::vector<uint8_t> first_x = maker ? x : behind_windows(first, x);
  std::vector<uint8_t> y(y_bytes), z(z_bytes), found_y(y_bytes + guard), found_z(z_bytes + guard);
  ReferenceRows()[0]
      .create(first.spec)
      ->Run({s, first_x.data(), residual.empty() ? nullptr : residual.data(), y.data()}, pool);
  ReferenceRows()[0].create(second.spec)->Run({second.shape, y.data(), nullptr, z.data()}, pool);

  DeviceBuffer device_x(x.size()), device_r(y_bytes), device_y(y_bytes + guard), device_z(z_bytes + guard),
      device_made_of(made_of.size()), elsewhere(std::max({x.size(), made_of.size(), y_bytes, z_bytes}));
  Check(cudaMemcpy(device_x.Get(), x.data(), x.size(), cudaMemcpyHostToDevice), "copy x");
  if (maker) {
    Check(cudaMemcpy(device_made_of.Get(), made_of.data(), made_of.size(), cudaMemcpyHostToDevice),
          "copy x of the residuals");
  }
  bool equal = true;
  for (const cuda::ChainConfig& config : configs) {
    const auto plan = cuda::PlanChain(chain, config);
    Check(cudaMemset(device_y.Get(), 0xA5, y_bytes + guard), "poison");
    Check(cudaMemset(device_z.Get(), 0xA5, z_bytes + guard), "poison");
    const bool in_place = generator.Coin();
    void* const added = maker              ? device_made_of.Get()
                        : residual.empty() ? nullptr
                        : in_place         ? device_y.Get()
                                           : device_r.Get();
    if (added != nullptr && !maker)
      Check(cudaMemcpy(added, residual.data(), y_bytes, cudaMemcpyHostToDevice), "copy residual");
    const bool overlap = generator.Coin();
    Run(
        [&](cuda::Queue& queue, bool moved) {
          cuda::LaunchChain(*plan, moved ? elsewhere.Get() : device_x.Get(), added,
                            moved ? elsewhere.Get() : device_y.Get(),
                            moved ? elsewhere.Get() : device_z.Get(), queue);
        },
        generator.Of({Way::kStream, Way::kStream, Way::kGraph, Way::kUpdatedGraph}), overlap);
    SynchronizeOrExit("chain " + config.Text());
    Check(cudaMemcpy(found_y.data(), device_y.Get(), found_y.size(), cudaMemcpyDeviceToHost), "copy y");
    Check(cudaMemcpy(found_z.data(), device_z.Get(), found_z.size(), cudaMemcpyDeviceToHost), "copy z");
    const bool has_tail = maker && maker->spec.epilogue.kind == EpilogueKind::kTail;
    Counts& counts = by[config.Text() + (maker ? " of a pair" : "") + (windows ? " behind windows" : "") +
                        (has_tail ? ", tails" : "")];
    ++counts.runs;
    const auto overrun = [](const std::vector<uint8_t>& found, size_t size) {
      return std::any_of(found.begin() + static_cast<int64_t>(size), found.end(),
                         [](uint8_t b) { return b != 0xA5; });
    };
    const bool equal_y = std::memcmp(y.data(), found_y.data(), y_bytes) == 0,
               equal_z = std::memcmp(z.data(), found_z.data(), z_bytes) == 0,
               overran = overrun(found_y, y_bytes) || overrun(found_z, z_bytes);
    if (equal_y && equal_z && !overran) continue;
    equal = false;
    ++counts.wrong_runs;
    std::cout << "WRONG chain " << config.Text() << (overlap ? " overlap" : "") << (equal_y ? "" : ", y")
              << (equal_z ? "" : ", z") << (overran ? ", guard bytes overwritten" : "") << "; x " << s.batch
              << "x" << s.in_h << "x" << s.in_w << "x" << first.spec.geometry.in_channels << " -> "
              << first.spec.geometry.out_channels << " -> " << second.spec.geometry.out_channels
              << (maker              ? " and the product that makes residuals, of " +
                                           std::to_string(maker->spec.geometry.in_channels) + " channels"
                  : residual.empty() ? ""
                  : in_place         ? " residual in place"
                                     : " residual");
    if (windows) {
      const ConvGeometry& g = windows->spec.geometry;
      std::cout << " behind windows of " << g.kernel_h << "x" << g.kernel_w << ", dilations " << g.dilation_h
                << " " << g.dilation_w << ", pads " << g.pad_top << " " << g.pad_left << ", " << g.in_channels
                << " channels";
    }
    std::cout << "\n";
  }
  return equal;
}

std::vector<uint8_t> MaxPool(const PooledNode& pooled, const std::vector<uint8_t>& codes) {
  const ConvShape& s = pooled.conv.shape;
  const int64_t channels = pooled.conv.spec.geometry.out_channels;
  const bool is_signed = pooled.conv.spec.epilogue.y_signed;
  std::vector<uint8_t> y;
  for (int64_t i = 0; i < s.batch * pooled.pooled_h * pooled.pooled_w * channels; ++i) {
    const int64_t c = i % channels, column = i / channels % pooled.pooled_w,
                  line = i / channels / pooled.pooled_w, row = line % pooled.pooled_h,
                  image = line / pooled.pooled_h;
    int largest = -1000;
    for (int64_t tap = 0; tap < 9; ++tap) {
      const int64_t oy = 2 * row - pooled.window.pad_begin[1] + tap / 3,
                    ox = 2 * column - pooled.window.pad_begin[2] + tap % 3;
      if (oy < 0 || oy >= s.out_h || ox < 0 || ox >= s.out_w) continue;
      const uint8_t code = codes[static_cast<size_t>(((image * s.out_h + oy) * s.out_w + ox) * channels + c)];
      largest = std::max(largest, is_signed ? static_cast<int>(static_cast<int8_t>(code)) : int{code});
    }
    y.push_back(static_cast<uint8_t>(largest));
  }
  return y;
}

// Returns whether a convolution and its pooling in one launch agree; true where they are two.
bool TestPooled(Generator& generator, const cuda::Device& device, std::map<std::string, Counts>& by) {
  const PooledNode node = generator.MakePooled();
  const ConvSpec& spec = node.conv.spec;
  const ConvShape& s = node.conv.shape;
  const ConvGeometry& g = spec.geometry;
  std::vector<uint8_t> x(static_cast<size_t>(s.batch * s.in_h * s.in_w * g.in_channels)),
      codes(static_cast<size_t>(s.OutPixels() * g.out_channels));
  std::vector<float> floats;
  cuda::PixelQuantizer quantizer = MakePixels(spec, s, generator, floats, x, true);
  Threads pool;
  ReferenceRows()[0].create(spec)->Run({s, x.data(), nullptr, codes.data()}, pool);
  std::vector<uint8_t> expected = MaxPool(node, codes);

  cuda::PooledConv pooled{
      cuda::PackConv(spec, device), quantizer, s, node.window, node.pooled_h, node.pooled_w};
  if (generator.Coin(0.3)) {  // as a compiled model brings it
    ConvSpec lean = spec;
    lean.weights.clear();
    pooled.conv = cuda::PackConv(lean, device, cuda::SavePacked(*pooled.conv));
  }
  for (const int planes : {2, 1}) {
    if (pooled.conv->MayStorePlanes(planes) && generator.Coin(0.8)) pooled.y_planes = planes;
  }
  if (pooled.y_planes > 0) expected = cuda::AsPlanes(expected, g.out_channels, pooled.y_planes);
  Counts& counts = by[cuda::Pools(pooled) ? pooled.y_planes > 0 ? "conv_pool to planes" : "conv_pool"
                                          : "conv_pool refuses"];
  ++counts.runs;
  if (!cuda::Pools(pooled)) return true;
  const auto rows = static_cast<int>(node.pooled_h);
  const auto plan =
      generator.Coin()
          ? cuda::PlanPooled(pooled)
          : cuda::PlanPooled(pooled, cuda::SplitRows(rows, static_cast<int>(generator.Int(1, rows))));
  constexpr size_t guard = 256;
  std::vector<uint8_t> found(expected.size() + guard);
  // The floats may begin anywhere.
  const auto shift = static_cast<size_t>(generator.Coin(0.7) ? 0 : generator.Int(1, 3));
  DeviceBuffer device_x((floats.size() + shift) * 4), device_y(found.size()),
      elsewhere(std::max(floats.size() * 4, found.size()));
  float* const from = static_cast<float*>(device_x.Get()) + shift;
  Check(cudaMemcpy(from, floats.data(), floats.size() * 4, cudaMemcpyHostToDevice), "copy x");
  Check(cudaMemset(device_y.Get(), 0xA5, found.size()), "poison");
  const bool overlap = generator.Coin();
  Run(
      [&](cuda::Queue& queue, bool moved) {
        cuda::LaunchPooled(*plan, moved ? elsewhere.Get() : from, moved ? elsewhere.Get() : device_y.Get(),
                           queue);
      },
      generator.Of({Way::kStream, Way::kStream, Way::kGraph, Way::kUpdatedGraph}), overlap);
  SynchronizeOrExit(cuda::PlanText(*plan));
  Check(cudaMemcpy(found.data(), device_y.Get(), found.size(), cudaMemcpyDeviceToHost), "copy y");
  const auto differs =
      std::mismatch(expected.begin(), expected.end(), found.begin()).first - expected.begin();
  const bool overran = std::any_of(found.begin() + static_cast<int64_t>(expected.size()), found.end(),
                                   [](uint8_t b) { return b != 0xA5; });
  if (differs == static_cast<int64_t>(expected.size()) && !overran) return true;
  ++counts.wrong_runs;
  std::cout << "WRONG " << cuda::PlanText(*plan) << (overlap ? " overlap" : "") << ": first " << differs
            << " of " << expected.size() << (overran ? ", guard bytes overwritten" : "") << "; x " << s.batch
            << "x" << s.in_h << "x" << s.in_w << "x" << g.in_channels << " -> " << s.out_h << "x" << s.out_w
            << "x" << g.out_channels << " -> " << node.pooled_h << "x" << node.pooled_w << " kernel "
            << g.kernel_h << "x" << g.kernel_w << " pads " << g.pad_top << " " << g.pad_left << ", "
            << node.window.pad_begin[1] << " " << node.window.pad_begin[2] << " shift " << shift << "\n";
  return false;
}

// Every way in which kernels that are made for one finish their sums, in single convolutions, in pairs and in
// chains. Returns how many nodes there were, how many had a wrong element.
std::pair<int64_t, int64_t> TestFinishes(Generator& generator, const cuda::Device& device,
                                         std::map<std::string, Counts>& by, size_t most,
                                         const std::string& text) {
  using enum cuda::Finish;
  int64_t nodes = 0, wrong = 0;
  const ConvShape shape = {2, 7, 9, 7, 9};
  const auto channels = [&] { return 16 * generator.Int(1, 6); };  // no windows
  const auto count = [&](bool equal) {
    ++nodes;
    wrong += equal ? 0 : 1;
  };
  for (const cuda::Finish finish :
       {kIntegersInTail, kIntegersInTail, kFloatsFromZero, kFloatsOnLine, kFloatsInverse, kCappedFromZero,
        kTail, kLackingTail, kCappedOnLine, kCappedTailOnLine, kCappedLackingOnLine, kCappedInTail,
        kWordsTailOnLine, kFloats, kFloatsAdding}) {
    const Node node =
        generator.Finishing(finish, shape, generator.Coin() ? 128 : channels(), channels(), device);
    count(TestNode(node, generator, device, by, most, text));
  }
  for (const cuda::Finish finish :
       {kFloatsFromZero, kCappedFromZero, kTail, kLackingTail, kFloatsOnLine, kFloatsInverse, kCappedOnLine,
        kCappedTailOnLine, kCappedLackingOnLine, kCappedInTail, kWordsTailOnLine, kFloats, kFloatsAdding}) {
    const Node node = generator.Finishing(finish, shape, generator.Coin() ? 128 : channels(), channels(),
                                          device, false, true);
    count(TestNode(node, generator, device, by, most, text));
  }
  for (const int64_t out : {64, 128}) {
    const Node node = generator.Finishing(kBorderTail, shape, 128, out, device, true);
    count(TestNode(node, generator, device, by, most, text));
  }
  // Whose codes are capped, as the pair's kernel asks of tails.
  const auto capped = [&](cuda::Finish finish, int64_t out) {
    Node node;
    do {
      node = generator.Finishing(finish, shape, channels(), out, device);
    } while (!cuda::PackedConv(node.spec, device, {}).EpilogueOf().is_capped);
    return node;
  };
  for (const cuda::Finish finish : {kCappedTailOnLine, kCappedLackingOnLine, kCappedInTail}) {
    const int64_t out = channels();
    ResidualPairCase pair;
    pair.first = capped(generator.Coin() ? kTail : kLackingTail, out).spec;
    pair.second = generator.Finishing(finish, shape, channels(), out, device).spec;
    pair.shapes = {shape, shape};
    count(TestResidualPair(pair, generator, device, by, most, text));
  }
  const auto making = [&](int64_t out) { return generator.Making(shape, channels(), out, device); };
  for (const cuda::Finish finish : {kFloatsOnLine, kCappedOnLine}) {
    const int64_t out = channels();
    ResidualPairCase pair;
    pair.first = making(out).spec;
    pair.second = generator.Finishing(finish, shape, channels(), out, device).spec;
    pair.shapes = {shape, shape};
    count(TestResidualPair(pair, generator, device, by, most, text));
  }
  const std::pair<cuda::Finish, cuda::Finish> chains[] = {
      {kFloatsFromZero, kFloatsFromZero}, {kFloatsOnLine, kFloatsFromZero},
      {kFloatsInverse, kFloatsFromZero},  {kCappedOnLine, kCappedFromZero},
      {kCappedTailOnLine, kTail},         {kCappedTailOnLine, kLackingTail},
      {kCappedLackingOnLine, kTail},      {kCappedInTail, kTail},
      {kWordsTailOnLine, kTail},          {kFloatsAdding, kFloats}};
  for (const auto& [first, second] : chains) {
    const int64_t in = channels(), between = channels();
    Chain chain{generator.Finishing(first, shape, in, between, device),
                generator.Finishing(second, shape, between, channels(), device), std::nullopt};
    if (chain.first.spec.epilogue.has_residual && generator.Coin()) {
      const bool is_tail = chain.first.spec.epilogue.kind == EpilogueKind::kTail;
      chain.residuals = !is_tail && generator.Coin()
                            ? making(between)
                            : generator.Finishing(!is_tail           ? kFloatsFromZero
                                                  : generator.Coin() ? kTail
                                                                     : kLackingTail,
                                                  shape, channels(), between, device);
    }
    count(TestChain(chain, generator, device, by, most, text));
  }
  return {nodes, wrong};
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int64_t per_class = argc > 1 ? std::atoll(argv[1]) : 20;
    const uint32_t seed = argc > 2 ? static_cast<uint32_t>(std::atoll(argv[2])) : 1;
    const size_t most = argc > 3 ? static_cast<size_t>(std::atoll(argv[3])) : 24;
    cuda::Device device = cuda::Device::Query(0);
    if (argc > 4) device.capability = std::min(device.capability, std::atoi(argv[4]));
    std::string text = argc > 5 ? argv[5] : "all";  // of configurations
    if (text == "all") text.clear();
    const std::string only_kind = argc > 6 ? argv[6] : "";
    Generator generator(seed);
    std::map<std::string, Counts> by;
    int64_t nodes = 0, wrong = 0;
    for (const char* kind :
         {"spatial", "windows", "bits", "bipolar", "pointwise", "gemm", "few rows", "deep", "channels",
          "group", "depthwise", "stem", "transposed", "many pixels", "planes", "flat bits"}) {
      if (!only_kind.empty() && only_kind != kind) continue;
      for (int64_t i = 0; i < per_class; ++i, ++nodes) {
        if (!TestNode(generator.Make(kind), generator, device, by, most, text)) ++wrong;
      }
    }
    for (int64_t i = 0; (only_kind.empty() || only_kind == "pair") && i < per_class; ++i, ++nodes) {
      if (!TestResidualPair(generator.MakeResidualPair(), generator, device, by, most, text)) ++wrong;
    }
    for (int64_t i = 0; (only_kind.empty() || only_kind == "bit pair") && i < per_class; ++i, ++nodes) {
      if (!TestResidualPair(generator.MakeBitPair(device), generator, device, by, most, text, true)) ++wrong;
    }
    for (int64_t i = 0; (only_kind.empty() || only_kind == "bit blocks") && i < per_class; ++i, ++nodes) {
      if (!TestBitBlocks(generator.MakeBitBlocks(device), generator, device, by, most, text)) ++wrong;
    }
    if (only_kind.empty() || only_kind == "chain") {
      for (int64_t i = 0; i < per_class; ++i, ++nodes) {
        if (!TestChain(generator.MakeChain(), generator, device, by, most, text)) ++wrong;
      }
    }
    for (int64_t i = 0; (only_kind.empty() || only_kind == "bottleneck") && i < per_class; ++i, ++nodes) {
      if (!TestChain(generator.MakeBottleneck(device), generator, device, by, most, text)) ++wrong;
    }
    for (int64_t i = 0; (only_kind.empty() || only_kind == "affined") && i < per_class; ++i, ++nodes) {
      if (!TestAffineConv(generator.MakeAffineConv(), generator, device, by, most, text)) ++wrong;
    }
    for (int64_t i = 0; (only_kind.empty() || only_kind == "gated") && i < per_class; ++i, ++nodes) {
      if (!TestGated(generator.MakeGated(), generator, device, by)) ++wrong;
    }
    for (int64_t i = 0; (only_kind.empty() || only_kind == "pooled") && i < per_class; ++i, ++nodes) {
      if (!TestPooled(generator, device, by)) ++wrong;
    }
    for (int64_t i = 0; only_kind == "finishes" && i < per_class; ++i) {
      const auto [tested, failed] = TestFinishes(generator, device, by, most, text);
      nodes += tested;
      wrong += failed;
    }
    for (const auto& [name, counts] : by) {
      std::cout << name << ": " << counts.runs << " runs, " << counts.wrong_runs << " wrong\n";
    }
    std::cout << device.name << ", seed " << seed << ": " << nodes << " nodes, " << wrong
              << " with a wrong element\n";
    return wrong == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
