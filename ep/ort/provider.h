// The execution provider of one session.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "core/provider_options.h"
#include "ep/ort/compute.h"
#include "ep/ort/context_model.h"
#include "ep/ort/converted_model.h"
#include "ep/ort/device.h"
#include "ep/ort/memcpy_kernels.h"
#include "ep/region/backend.h"

namespace lowbit::ep {

using CreateBackend = std::function<std::shared_ptr<Backend>(const EpOptions&)>;

class Provider final : public OrtEp {
 public:
  // `device` and `registry` are null for the CPU. Throws Error.
  Provider(const CreateBackend& create_backend, std::shared_ptr<Device> device,
           const OrtKernelRegistry* registry, const OrtSessionOptions* session, Logger logger);

 private:
  struct Compiled {
    std::unique_ptr<RegionCompute> compute;
    Owned<OrtNode> context_node;
  };

  void Fill();
  void Claim(const OrtGraph* graph, OrtEpGraphSupportInfo* claims);
  OrtNodeComputeInfo* OpenConverted(const OrtNode* fused) const;
  Compiled CompileRegion(const OrtGraph* graph, const OrtNode* fused, ContextWriter* writer) const;
  void CompileAll(const OrtGraph** graphs, const OrtNode** fused, size_t count, OrtNodeComputeInfo** infos,
                  OrtNode** context_nodes);

  const Logger logger_;
  const std::shared_ptr<Device> device_;
  const OrtKernelRegistry* registry_;
  std::map<std::string, std::string> entries_;  // of the session
  const ContextSettings context_;
  std::shared_ptr<Backend> backend_;
  std::string fingerprint_;
  std::set<std::string> told_;
  std::string fault_;  // why the model can never run
  // Where option `converted_model` is given: the file, the options that open it, and what it stands for.
  std::string converted_model_;
  Owned<OrtSessionOptions> options_inside_;
  SourceModel source_;
};

}  // namespace lowbit::ep
