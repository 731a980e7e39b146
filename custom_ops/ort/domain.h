#pragma once

#include "include/lowbit.h"
#include "ort/ort_api.h"

namespace lowbit::ort {

// The ops of ai.lowbit. Shared by every session and never released: sessions keep pointers into it and may
// live until the process ends. Throws Error.
OrtCustomOpDomain* Domain();

// What the custom ops need to know of the execution provider.
inline constexpr const char* kProviderName = LOWBIT_EP_NAME;
// Keys of the metadata of its devices.
inline constexpr const char* kDeviceKey = "device";                 // "cpu", "cuda:0"
inline constexpr const char* kUnavailableKey = "cuda_unavailable";  // why a GPU is not offered
inline constexpr const char* kAloneKey = "cpu_alone";  // "1": this registration looked for no GPU

// A session takes a domain once. The execution provider brings it along too, and tells by an option of its
// devices, which ONNX Runtime enters into the options of every session that takes one of them, under the
// prefix.
inline constexpr const char* kProviderPrefix = "ep.lowbitexecutionprovider.";
inline constexpr const char* kBringsOps = "brings_ops";
// The session entry that says why custom ops stand in for the provider that was asked for. Their nodes log it:
// the session's log is not open yet when they are registered.
inline constexpr const char* kProviderRefused = "lowbit.ep_refused";

}  // namespace lowbit::ort
