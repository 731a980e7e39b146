// The tile registers of AMX-INT8: the instructions, and plain C++ that does the same. The kernels are written
// against either, so that their tests run on machines without AMX.
//
//   eight registers of up to 16 rows x 64 bytes, whose shapes the configuration states
//   Load<t>(p, pitch)    row r of t is the 64 bytes at p + r * pitch
//   Dot<signs>           int32 acc[m][n] += sum over k of a[m][k] * b[k / 4][4 n + k % 4]: of b, a row holds four
//                        values of k for each of 16 columns, the layout of the weights of vpdpbusd
//
// A TileScope leaves the thread's configuration as it was found: a library that configures once and then trusts it
// finds its shapes again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lowbit {
namespace {

inline constexpr size_t kTileRows = 16, kTileRowBytes = 64, kTileBytes = kTileRows * kTileRowBytes;

// The 64 bytes of ldtilecfg.
struct TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

#if defined(LOWBIT_EMULATE_AMX)

struct Tiles {
  static void Configure(const TileConfig& config) {
    State() = {};
    State().config = config;
  }
  static TileConfig Configuration() { return State().config; }
  template <int t>
  static void Zero() {
    std::memset(State().bytes[t], 0, kTileBytes);
  }
  template <int t>
  static void Load(const void* from, size_t pitch) {
    for (size_t r = 0; r < Rows(t); ++r)
      std::memcpy(State().bytes[t] + r * kTileRowBytes, static_cast<const uint8_t*>(from) + r * pitch,
                  RowBytes(t));
  }
  template <int t>
  static void Store(void* to, size_t pitch) {
    for (size_t r = 0; r < Rows(t); ++r)
      std::memcpy(static_cast<uint8_t*>(to) + r * pitch, State().bytes[t] + r * kTileRowBytes, RowBytes(t));
  }
  template <bool kSignedA, int acc, int a, int b>
  static void Dot() {
    const Registers& all = State();
    for (size_t m = 0; m < Rows(acc); ++m) {
      uint32_t sums[kTileRows];
      std::memcpy(sums, all.bytes[acc] + m * kTileRowBytes, sizeof(sums));
      for (size_t group = 0; group < RowBytes(a) / 4; ++group) {
        const uint8_t *x = all.bytes[a] + m * kTileRowBytes + group * 4,
                      *w = all.bytes[b] + group * kTileRowBytes;
        for (size_t k = 0; k < 4; ++k) {
          const int32_t value = kSignedA ? static_cast<int8_t>(x[k]) : int32_t{x[k]};
          for (size_t n = 0; n < kTileRows; ++n)
            sums[n] += static_cast<uint32_t>(value * static_cast<int8_t>(w[n * 4 + k]));
        }
      }
      std::memcpy(State().bytes[acc] + m * kTileRowBytes, sums, sizeof(sums));
    }
  }

 private:
  struct Registers {
    TileConfig config = {.palette = 0};
    uint8_t bytes[8][kTileBytes] = {};
  };
  static Registers& State() {
    static thread_local Registers registers;
    return registers;
  }
  static size_t Rows(int t) { return State().config.rows[t]; }
  static size_t RowBytes(int t) { return State().config.row_bytes[t]; }
};

#else

// Written as text: of the compilers' own names for these instructions some take only literal numbers.
struct Tiles {
  static void Configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config)); }
  static TileConfig Configuration() {
    TileConfig config;
    __asm__ volatile("sttilecfg %0" : "=m"(config));
    return config;
  }
  template <int t>
  static void Zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(t));
  }
  template <int t>
  static void Load(const void* from, size_t pitch) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(pitch), "i"(t) : "memory");
  }
  template <int t>
  static void Store(void* to, size_t pitch) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(pitch), "i"(t) : "memory");
  }
  template <bool kSignedA, int acc, int a, int b>
  static void Dot() {
    if constexpr (kSignedA) {
      __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(acc), "i"(a), "i"(b));
    } else {
      __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(acc), "i"(a), "i"(b));
    }
  }
};

#endif

// The caller's tiles are configured as `config` says while it lives.
class TileScope {
 public:
  explicit TileScope(const TileConfig& config) : found_(Tiles::Configuration()) { Tiles::Configure(config); }
  ~TileScope() { Tiles::Configure(found_); }  // palette 0 where there was none, which releases the tiles
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  const TileConfig found_;
};

}  // namespace
}  // namespace lowbit
