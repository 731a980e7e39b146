#include "ep/cpu/bands.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace lowbit::ep {
namespace {

// Kernels of images of few channels may read as many bytes behind a row's last pixel.
constexpr size_t kSlack = 64;

// How many rows of each step's output so many of the last one's need at once.
std::vector<int64_t> RowsOf(std::span<const BandStep> steps, int64_t rows) {
  std::vector<int64_t> all(steps.size());
  for (size_t i = steps.size(); i-- > 0;) {
    all[i] = std::min(rows, steps[i].window.out_rows);
    rows = (all[i] - 1) * steps[i].window.stride + steps[i].window.extent;
  }
  return all;
}

size_t BytesBetween(std::span<const BandStep> steps, int64_t rows) {
  const std::vector<int64_t> all = RowsOf(steps, rows);
  size_t bytes = 0;
  for (size_t i = 0; i + 1 < steps.size(); ++i)
    bytes += static_cast<size_t>(all[i]) * steps[i].window.out_bytes;
  return bytes;
}

}  // namespace

Bands::Bands(std::vector<BandStep> steps, size_t threads, size_t bytes)
    : steps_(std::move(steps)), memory_(0) {
  const int64_t all = steps_.back().window.out_rows;
  tasks_ = std::min(threads, static_cast<size_t>(all));
  rows_ = 1;
  while (rows_ < all && BytesBetween(steps_, rows_ + 1) <= bytes) ++rows_;
  const std::vector<int64_t> rows = RowsOf(steps_, rows_);
  for (size_t i = 0; i + 1 < steps_.size(); ++i) {
    buffers_.push_back(task_bytes_);
    const size_t size = static_cast<size_t>(rows[i]) * steps_[i].window.out_bytes + kSlack;
    task_bytes_ +=
        (size + AlignedBytes::kAlignment - 1) / AlignedBytes::kAlignment * AlignedBytes::kAlignment;
  }
  memory_ = AlignedBytes(task_bytes_ * tasks_);
}

void Bands::Run(const void* x, void* y, ThreadPool& pool) {
  pool.ParallelFor(tasks_, [&](size_t task) { RunTask(task, x, y); });
}

void Bands::RunTask(size_t task, const void* x, void* y) {
  const size_t last = steps_.size() - 1;
  const auto share = [&](size_t i) {
    return static_cast<int64_t>(static_cast<size_t>(steps_[last].window.out_rows) * i / tasks_);
  };
  InlineThreadPool alone;
  std::vector<RowRange> needed(steps_.size()), held(last);
  std::vector<std::optional<ConstTensor>> inputs;
  for (int64_t begin = share(task); begin < share(task + 1); begin += rows_) {
    needed[last] = {begin, std::min(begin + rows_, share(task + 1))};
    for (size_t i = last; i > 0; --i) needed[i - 1] = steps_[i].window.Reads(needed[i]);
    for (size_t i = 0; i <= last; ++i) {
      const BandStep& step = steps_[i];
      RowBand band{needed[i]};
      inputs = step.inputs;
      inputs[step.fed]->data = x;
      if (i > 0) {
        inputs[step.fed]->data = memory_.data() + task * task_bytes_ + buffers_[i - 1];
        band.x_first = held[i - 1].begin;
      }
      void* to = y;
      if (i < last) {
        uint8_t* const buffer = memory_.data() + task * task_bytes_ + buffers_[i];
        const int64_t first = needed[i].begin, kept = std::max<int64_t>(held[i].end - first, 0);
        if (kept > 0) {
          std::memmove(buffer, buffer + static_cast<size_t>(first - held[i].begin) * step.window.out_bytes,
                       static_cast<size_t>(kept) * step.window.out_bytes);
        }
        held[i] = {first, std::max(needed[i].end, first + kept)};
        band.rows.begin = first + kept;
        band.y_first = first;
        to = buffer;
      }
      if (band.rows.count() > 0) step.op->RunRows(inputs, to, band, alone);
    }
  }
}

}  // namespace lowbit::ep
