// Codes and the bits that are stated for them. A matrix product states how many bits the codes of its x have
// (x_bits): kernels count on it. A stored byte is read as its low bits, in two's complement for signed codes;
// who runs a node sees to it wherever the node that makes the codes does not prove it already.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "core/nodes.h"
#include "core/types.h"

namespace lowbit {

// The codes that a tensor may hold.
struct MadeCodes {
  int32_t lo = 0, hi = 255;
  // The node that makes them says so, by y_bits and what narrows them: a reader of fewer bits is a mistake.
  // Otherwise the numbers only happen to be bounded (by a table's entries).
  bool stated = false;
  bool operator==(const MadeCodes&) const = default;
};

// The codes of a tensor that joins two others; nullopt where one is not known.
std::optional<MadeCodes> Joined(const std::optional<MadeCodes>& a, const std::optional<MadeCodes>& b);

// The codes that a node makes; `fed` are those of what it is fed, in the order of the schema, nullopt where
// they are not known. nullopt: not known, or no codes.
std::optional<MadeCodes> CodesMadeBy(const NodeSpec& node, std::span<const std::optional<MadeCodes>> fed);

// Whether x, which holds `codes`, needs no look before a kernel reads it. Throws Error where the node that
// makes it states more bits than x_bits.
bool HoldsStatedBits(const MatmulNode& node, const std::optional<MadeCodes>& codes);

// How a byte becomes the code of its low bits: ((byte + flip) & mask) - flip.
struct LowBits {
  explicit LowBits(OperandType type)
      : flip(type.encoding == Encoding::kSigned ? static_cast<uint8_t>(1 << (type.bits - 1)) : uint8_t{0}),
        mask(static_cast<uint8_t>((1 << type.bits) - 1)) {}
  uint8_t Of(uint8_t byte) const {
    return static_cast<uint8_t>((static_cast<uint8_t>(byte + flip) & mask) - flip);
  }
  uint8_t flip, mask;
};

// Whether every byte is the code of its low bits.
bool AreLowBits(std::span<const uint8_t> bytes, LowBits low);

}  // namespace lowbit
