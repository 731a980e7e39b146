// Which nodes of a model this provider takes.
#pragma once

#include <set>
#include <string>

#include "ep/ort/ep_api.h"
#include "ep/region/backend.h"

namespace lowbit::ep {

struct ClaimSettings {
  bool takes_any_model = false;  // a quantized model that was not converted is nothing to warn of
  bool keeps_weights = false;    // the initializers of regions stay with ONNX Runtime
};

// Claims every region that `backend` runs and every EPContext node of this provider. ONNX Runtime asks again
// after each round of fusing; `told` holds what was logged already. Returns why the model can never run, where
// that takes more than one region to see; empty: nothing does.
std::string ClaimNodes(const OrtGraph* graph, const Backend& backend, const Logger& logger,
                       const ClaimSettings& settings, std::set<std::string>& told,
                       OrtEpGraphSupportInfo* claims);

// Claims all nodes as one, which the file of option `converted_model` then stands for. Returns why it cannot.
std::string ClaimModel(const OrtGraph* graph, OrtEpGraphSupportInfo* claims);

// Claims a node, whichever it is, for a session that must not run: it is told so where its nodes are compiled.
void ClaimAnyNode(const OrtGraph* graph, OrtEpGraphSupportInfo* claims);

}  // namespace lowbit::ep
