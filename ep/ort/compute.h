// The run of one fused node: ONNX Runtime's tensors in, the program, ONNX Runtime's tensors out.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ep/ort/device.h"
#include "ep/region/program.h"

namespace lowbit::ep {

// What ONNX Runtime runs in the place of a fused node.
class NodeCompute : public OrtNodeComputeInfo {
 public:
  // `where` begins the errors of runs.
  explicit NodeCompute(std::string where);
  virtual ~NodeCompute() = default;
  NodeCompute(const NodeCompute&) = delete;
  NodeCompute& operator=(const NodeCompute&) = delete;

 private:
  // Called by many threads at once. Throws Error.
  virtual void Run(OrtKernelContext* context) const = 0;

  const std::string where_;
};

class RegionCompute final : public NodeCompute {
 public:
  struct Binding {
    std::vector<size_t> inputs, outputs;  // of the fused node, in the program's order
  };
  // `device`: null for the CPU. `name` begins the region's errors.
  RegionCompute(std::shared_ptr<Program> program, Binding binding, std::shared_ptr<Device> device,
                std::string name);

 private:
  void Run(OrtKernelContext* context) const override;
  void RunOn(Device* device, const std::shared_ptr<const RegionPlan>& plan, std::span<void* const> externals,
             OrtKernelContext* context) const;

  const std::shared_ptr<Program> program_;
  const Binding binding_;
  const std::shared_ptr<Device> device_;
};

}  // namespace lowbit::ep
