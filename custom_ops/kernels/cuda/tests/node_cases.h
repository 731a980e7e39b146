// Random nodes with their inputs and the outputs that they must have.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/float_precision.h"
#include "core/nodes.h"
#include "core/nodes/standard_nodes.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/nodes/node_support.h"
#include "kernels/cuda/tests/draws.h"

namespace lowbit::cuda::test {

struct Case {
  std::string kind;
  std::variant<NodeSpec, StandardNode> node;
  std::vector<TensorShape> fed;
  std::vector<std::vector<uint8_t>> data;
  TensorShape y;
  std::vector<uint8_t> expected;
  float tolerance = 0;  // relative, of float32 outputs; 0: every bit
  FloatPrecision precision = FloatPrecision::kFloat32;
  std::optional<FloatTiling> tiling = std::nullopt;       // of a float product
  std::optional<WinogradTiling> winograd = std::nullopt;  // of a convolution that has it
  bool is_older = false;                                  // of either; as on a GPU of capability 80
  bool adds = false;                                      // what is fed last to the sums of a float product
  std::optional<UnaryOp> activation = std::nullopt;       // fused with the node
  std::optional<QuantizeNode> quantizer = std::nullopt;   // likewise
  std::optional<TransposeOp> transpose = std::nullopt;    // in front of the node, likewise
  std::optional<LookupNode> lookup = std::nullopt;  // of what is fed first, in front of an addition, likewise
  bool mapped_first = false;                        // what it makes is the first operand
};

inline int64_t Count(const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) count *= dim;
  return count;
}

// A draw of one random node.
class Draw : public Draws {
 public:
  Draw(uint32_t seed, Device device) : Draws(seed), device_(std::move(device)) {}

  // What the node is to run on.
  const Device& RunsOn() const { return device_; }

  int64_t Channels() {
    return Coin(0.4) ? Int(1, 200) : Of<int64_t>({1, 2, 3, 4, 5, 16, 32, 48, 64, 65, 128, 144, 200});
  }

  // [.., channels] of any rank from 1 to 5.
  std::vector<int64_t> Shape(int64_t channels) {
    std::vector<int64_t> dims(static_cast<size_t>(Int(0, 4)));
    for (auto& d : dims) d = Coin(0.2) ? 1 : Int(1, 9);
    dims.push_back(channels);
    return dims;
  }

  // Powers of two make ties, extreme scales leave the range of the fast division.
  float Scale() {
    if (Coin(0.05)) return Of({1e-30f, 1e30f, 3e-39f, 0x1p-61f});
    if (Coin(0.4)) return std::exp2(static_cast<float>(Int(-6, 0)));
    return Real(0.005f, 0.2f);
  }
  int32_t ZeroPoint(bool is_signed) {
    const int32_t shift = is_signed ? 128 : 0;
    if (Coin(0.2)) return Of({0, 255, 128}) - shift;
    return static_cast<int32_t>(Int(0, 255)) - shift;
  }
  Quantizer Grid() {
    Quantizer q;
    q.is_signed = Coin();
    const OperandType type{static_cast<int>(Coin(0.7) ? 8 : Int(1, 7)),
                           q.is_signed ? Encoding::kSigned : Encoding::kUnsigned};
    q.scale = Scale();
    q.zero_point = static_cast<int32_t>(Int(type.MinCode(), type.MaxCode()));
    q.lo = Coin(0.3) ? q.zero_point : type.MinCode();
    q.hi = Coin(0.1) ? q.lo : type.MaxCode();
    return q;
  }

  std::vector<uint8_t> Codes(int64_t count) {
    std::vector<uint8_t> out(static_cast<size_t>(count));
    const bool extreme = Coin(0.1);
    for (auto& c : out) {
      constexpr uint8_t kExtremes[] = {0, 255, 127, 128};
      const auto word = static_cast<uint32_t>(random_());
      c = extreme || (word & 0xFFu) < kRare ? kExtremes[word >> 8 & 3u] : static_cast<uint8_t>(word >> 16);
    }
    return out;
  }
  // Floats around the codes of a grid: ties, numbers beyond all codes, infinities, NaN.
  std::vector<float> Floats(int64_t count, float scale) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    std::vector<float> out(static_cast<size_t>(count));
    for (auto& v : out) {
      v = Real(-300, 300) * scale;
      if (Coin(0.3)) v = (static_cast<float>(Int(-300, 300)) + 0.5f) * scale;
      if (Coin(0.05)) {
        v = Of({kInfinity, -kInfinity, std::nanf(""), -std::nanf(""), 3e38f, -3e38f, 1e-42f, -0.0f, 1e9f});
      }
    }
    return out;
  }

 private:
  Device device_;
};

template <typename T>
std::vector<uint8_t> Bytes(const std::vector<T>& values) {
  std::vector<uint8_t> out(values.size() * sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), values.data(), out.size());
  return out;
}

// An element of a tensor as the number that it is.
inline double NumberAt(const std::vector<uint8_t>& bytes, ElementType type, int64_t index) {
  const auto read = [&](auto v) {
    std::memcpy(&v, &bytes[static_cast<size_t>(index) * sizeof v], sizeof v);
    return v;
  };
  switch (type) {
    case ElementType::kUInt8:
      return read(uint8_t{});
    case ElementType::kInt8:
      return read(int8_t{});
    case ElementType::kInt32:
      return read(int32_t{});
    case ElementType::kFloat16:
      return FromHalf(read(uint16_t{}));
    case ElementType::kFloat:
      return read(float{});
  }
  return 0;
}

// The kinds of node_cases.cc and standard_cases.cc. A draw throws Error where the shapes that it hit upon fit
// no node; draw again then.
std::span<const std::string> Kinds();
Case MakeCase(const std::string& kind, Draw& draw);
std::span<const std::string> StandardKinds();
Case MakeStandardCase(const std::string& kind, Draw& draw);

}  // namespace lowbit::cuda::test
