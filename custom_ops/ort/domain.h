#pragma once

#include "ort/ort_api.h"

namespace lowbit::ort {

// The ops of ai.lowbit. Shared by every session and never released: sessions keep pointers into it and may
// live until the process ends. Throws Error.
OrtCustomOpDomain* Domain();

// A session takes a domain once. The execution provider brings it along too, and tells by an option of its
// devices, which ONNX Runtime enters into the options of every session that takes one of them, under the
// prefix.
inline constexpr const char* kProviderPrefix = "ep.lowbitexecutionprovider.";
inline constexpr const char* kBringsOps = "brings_ops";

}  // namespace lowbit::ort
