// Packed weights, shared between the sessions of a process by content: two sessions of one model hold them
// once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace lowbit {

// A zeroed buffer whose start is aligned to a cache line; a large one lies in large pages where the system has them.
class AlignedBytes {
 public:
  static constexpr size_t kAlignment = 64;

  explicit AlignedBytes(size_t size);

  uint8_t* data() { return data_.get(); }
  const uint8_t* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    std::align_val_t alignment;
    void operator()(uint8_t* p) const;
  };
  size_t size_;
  std::unique_ptr<uint8_t[], Free> data_;
};

using PackedWeights = std::shared_ptr<const AlignedBytes>;

// A kernel packs its weights, then hands them in here and keeps what comes back: `bytes` itself, or an equal
// buffer that another kernel already holds. The key is the content alone, compared byte for byte, so it does
// not matter which kernel packed it and from what. The last kernel that lets go frees it.
PackedWeights ShareWeights(AlignedBytes bytes);

// Live buffers, for tests.
size_t SharedWeightsCount();

}  // namespace lowbit
