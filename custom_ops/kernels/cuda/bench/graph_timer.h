// Times launches as a network runs them: as nodes of a CUDA graph that is replayed.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/cuda/device/memory.h"
#include "kernels/cuda/device/queue.h"

namespace lowbit::cuda {

class GraphTimer {
 public:
  using Launches = std::function<void(Queue&)>;  // enqueues all that the graph holds

  // A blocking stream: what a benchmark copies or fills by the default stream comes first.
  GraphTimer() {
    Check(cudaStreamCreate(&stream_), "making a stream");
    Check(cudaEventCreate(&begin_), "making an event");
    Check(cudaEventCreate(&end_), "making an event");
  }

  // Microseconds of a replay, by events around it: the median.
  double Microseconds(const Launches& launches, bool overlap, int replays) const {
    const Graph graph(launches, stream_, overlap);
    std::vector<double> times;
    for (int i = 0; i < replays; ++i) {
      Check(cudaEventRecord(begin_, stream_), "recording an event");
      graph.Launch(stream_);
      Check(cudaEventRecord(end_, stream_), "recording an event");
      Check(cudaEventSynchronize(end_), "waiting for an event");
      float milliseconds = 0;
      Check(cudaEventElapsedTime(&milliseconds, begin_, end_), "reading an event");
      times.push_back(1e3 * static_cast<double>(milliseconds));
    }
    return Median(times);
  }

  // Microseconds of wall time a replay where many are queued: the median of rounds.
  double QueuedMicroseconds(const Launches& launches, bool overlap) const {
    constexpr int kRounds = 5, kQueued = 100;
    const Graph graph(launches, stream_, overlap);
    Check(cudaStreamSynchronize(stream_), "waiting for a stream");
    std::vector<double> times;
    for (int round = 0; round < kRounds; ++round) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < kQueued; ++i) graph.Launch(stream_);
      Check(cudaStreamSynchronize(stream_), "waiting for a stream");
      const std::chrono::duration<double, std::micro> wall = std::chrono::steady_clock::now() - start;
      times.push_back(wall.count() / kQueued);
    }
    return Median(times);
  }

 private:
  // Captured, instantiated and replayed until it is warm.
  class Graph {
   public:
    Graph(const Launches& launches, cudaStream_t stream, bool overlap) {
      Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing");
      Queue queue(stream, overlap);
      launches(queue);
      Check(cudaStreamEndCapture(stream, &graph_), "capturing");
      Check(cudaGraphInstantiate(&executable_, graph_, 0), "instantiating a graph");
      constexpr int kWarmUps = 3;
      for (int i = 0; i < kWarmUps; ++i) Launch(stream);
    }
    ~Graph() {
      cudaGraphExecDestroy(executable_);
      cudaGraphDestroy(graph_);
    }
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    void Launch(cudaStream_t stream) const {
      Check(cudaGraphLaunch(executable_, stream), "launching a graph");
    }

   private:
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;
  };

  static double Median(std::vector<double>& times) {
    const auto middle = times.begin() + static_cast<int64_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    return *middle;
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace lowbit::cuda
