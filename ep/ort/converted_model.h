// Option `converted_model`: a session that was given a quantized model as its exporter wrote it runs the file
// that `lowbit convert` made of it, in a session inside of the session. For programs that cannot convert, and
// have one place where models are named.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ep/ort/compute.h"
#include "ep/ort/device.h"
#include "ep/ort/ep_api.h"
#include "ep/ort/graph_reader.h"
#include "ort/environment.h"

namespace lowbit::ep {

// The model that the session was given: its file, and what goes in and out.
struct SourceModel {
  std::filesystem::path file;  // empty: it came from memory
  std::vector<NamedType> inputs, outputs;
};
// Of the graph that GetCapability is shown. Throws Error.
SourceModel ReadSourceModel(const OrtGraph* graph);

// The options of the session inside: those of the one around it, which its provider knows it by.
Owned<OrtSessionOptions> OptionsInside(const OrtSessionOptions* around);
// Whether a session with these entries is one inside.
bool IsInside(const std::map<std::string, std::string>& session_entries);

// The run of the node that stands for the whole model.
class ConvertedCompute final : public NodeCompute {
 public:
  // Opens `converted`. Throws Error, with what differs, where it was not made of `source`. `device`: null for
  // the CPU. `inputs` and `outputs`: the names of the fused node's.
  ConvertedCompute(const std::filesystem::path& converted, const SourceModel& source,
                   const OrtSessionOptions* options, std::shared_ptr<Device> device,
                   std::vector<std::string> inputs, std::vector<std::string> outputs);

 private:
  void Run(OrtKernelContext* context) const override;

  const ort::Environment environment_;
  const std::shared_ptr<Device> device_;
  const std::vector<std::string> inputs_, outputs_;
  Owned<OrtSession> session_;
  Owned<OrtMemoryInfo> host_memory_;
};

}  // namespace lowbit::ep
