// Some rows of an operator's output at a time: what follows can read them while they are in a cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace lowbit {

// Rows [begin, end) of an image.
struct RowRange {
  int64_t begin = 0, end = 0;
  int64_t count() const { return end - begin; }
};

// What is computed: some rows of y, from memory that need not hold all rows of x.
struct RowBand {
  RowRange rows;
  int64_t x_first = 0, y_first = 0;  // the rows with which the memory of x and of y begins
};

// Which rows of x those of y depend on, and how large they are.
struct RowWindow {
  int64_t in_rows, out_rows, stride, extent, pad;
  size_t in_bytes, out_bytes;  // of a row

  RowRange Reads(RowRange rows) const {
    const int64_t begin = std::clamp<int64_t>(rows.begin * stride - pad, 0, in_rows);
    return {begin, std::clamp<int64_t>((rows.end - 1) * stride - pad + extent, begin, in_rows)};
  }
};

}  // namespace lowbit
