// The execution provider for hosts that load custom-op libraries and nothing else: RegisterCustomOps appends it
// to the session's options where the session entry `lowbit.ep`, or else the environment variable LOWBIT_EP, asks
// for it.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "ort/ort_api.h"

namespace lowbit::ort {

struct AskedProvider {
  std::string device;  // "cpu", "cuda:1"; "cuda:*" for each session the next GPU
  std::map<std::string, std::string> options;
};

// "cuda:1,tuning=off": a device, whose number may be left out, and options of the provider. nullopt for "none",
// which means custom ops. Throws Error for text that says neither.
std::optional<AskedProvider> ParseAskedProvider(std::string_view text);
// What the session, or else the process, asks for. Throws Error.
std::optional<AskedProvider> FindAskedProvider(const OrtSessionOptions* options);

// Registers this library as a provider with the host's environment, unless it is registered, and appends the
// device to the options. Gives the reason why that cannot be; empty where it was done.
std::string AppendProvider(OrtSessionOptions* options, const OrtApiBase* base, const AskedProvider& asked);

// The file of the library that this code is part of; empty where the system does not tell.
std::filesystem::path OwnLibrary();

}  // namespace lowbit::ort
