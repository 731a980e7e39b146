// The file of measured choices: which kernel was the fastest for which node. One format for every kind of
// machine; what runs the kernels (core/cpu/tune_cache.h for CPUs, ep/cuda/tuner.h for GPUs) says whose
// measurements it wants.
//
// A file belongs to one kind of machine and one build of lowbit: its name is a hash of both, its header
// spells them out. It is text:
//
//   lowbit tune cache 1
//   machine AMD EPYC 9B45, family 26 model 2 stepping 1
//   build lowbit 0.1.0, kernels 1f0a93b4c2d7e586
//   entries 2, checksum 9b1c04d3aa27f310
//   1 <TAB> conv i64 o64 ... isa=avx512popcnt <TAB> igemm_u8s8_6x64_avx512vnni
//   ...
//
// Nothing in it is trusted. A file that is not exactly of this form counts for nothing, and an entry is only
// a wish: its kernel is taken where it applies to the node. So the worst that a file can do is to make a node
// slower.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "core/conv.h"

namespace lowbit {

// (what the node computes: TuneKey, threads) -> name of the fastest kernel; GPUs always have one thread
using TuneEntries = std::map<std::pair<std::string, int>, std::string>;

// Everything that measurements depend on beside the node, each one line of printable ASCII.
struct TuneOrigin {
  std::string machine, build;
};

// Everything of a node that decides which kernel is fastest: geometry, operands, epilogue, and the shape as
// the caller writes it. `weight_values`: the values of few-bit weights count too (they do for the kernels of
// CPUs).
std::string DescribeForTuning(const ConvSpec& spec, std::string_view shape, bool weight_values);

// Throws Error with the entry that the format cannot hold.
std::string FormatTuneFile(const TuneOrigin& origin, const TuneEntries& entries);
// Throws Error with what is wrong with the text.
TuneEntries ParseTuneFile(const TuneOrigin& origin, std::string_view text);

// Where the file of `origin` lies: in `folder`, or else in LOWBIT_CACHE_DIR or the user's cache folder; empty
// where the environment names neither.
std::string TuneFilePath(const TuneOrigin& origin, const std::string& folder = {});

// LOWBIT_TUNE=off (or 0): sessions do without the file.
bool TuneCacheEnabled();

// FNV-1a as 16 hexadecimal digits: tells accidents, not attacks, and needs no table.
std::string TextHash(std::string_view text);

// A file as this process knows it. Safe to use from several threads.
class TuneFile {
 public:
  explicit TuneFile(TuneOrigin origin) : origin_(std::move(origin)) {}

  // What the file at `path` holds; it is read again when it has changed. Where it is not usable, `warn` hears
  // why, once for each state of the file, and it counts as empty.
  std::shared_ptr<const TuneEntries> Read(const std::string& path,
                                          const std::function<void(const std::string&)>& warn);
  // Adds entries to those of the file: a new file takes the place of the old one. Throws Error.
  void Add(const std::string& path, const TuneEntries& entries);

 private:
  // What tells that a file changed. Writers rename a new file into place.
  struct State {
    std::string path;
    bool exists = false;
    std::filesystem::file_time_type time;
    uintmax_t size = 0;
    bool operator==(const State&) const = default;
  };
  static State StateOf(const std::string& path);
  static std::string Text(const State& state);

  const TuneOrigin origin_;
  std::mutex mutex_, writing_;
  State state_;
  std::shared_ptr<const TuneEntries> entries_ = std::make_shared<TuneEntries>();
};

}  // namespace lowbit
